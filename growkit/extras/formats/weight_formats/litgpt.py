"""``lit_model.pth`` of litgpt, with ``model_config.yaml``, by which litgpt computes.

Files of litgpt before 0.5 hold queries, keys and values group by group in ``attn.attn``, later ones
one after the other in ``attn.qkv`` (https://github.com/Lightning-AI/litgpt).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from growkit.base.axes import ORDERS
from growkit.base.tensors import TORCH_NAMES, Config, main_dtype
from growkit.extras.formats.layout import ForeignSettings, Held, LaidOut, row_sizes
from growkit.extras.formats.torch_archive import archive_shard
from growkit.model.checkpoint.folder import Folder, read_yaml
from growkit.model.checkpoint.format import Output
from growkit.model.checkpoint.weight_file import (
    TorchFile,
    WeightFile,
    explain_damage,
    open_saved,
    plain_tensors,
)
from growkit.model.families.family_parts import MAX_LAYERS
from growkit.model.model import Model

WEIGHTS, CONFIG = "lit_model.pth", "model_config.yaml"
KIND = TorchFile("weights of litgpt", "save it again with litgpt")

QKV = tuple(f"model.layers.{{layer}}.self_attn.{kind}_proj" for kind in "qkv")
ROWS = ("heads.head_dim", "kv_heads.head_dim", "kv_heads.head_dim")
GROUPS = ORDERS["with_keys_and_values"]("heads", "kv_heads", "head_dim")
NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
LAYER = {
    "norm_1": "input_layernorm",
    "attn.proj": "self_attn.o_proj",
    "attn.norm_q": "self_attn.q_norm",
    "attn.norm_k": "self_attn.k_norm",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
USUAL = {**LAYER, "norm_2": "post_attention_layernorm"}
GEMMA = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "norm_2": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {
    **USUAL,
    "mlp.gate": "mlp.gate",
    "mlp.experts.{expert}.fc_1": "mlp.experts.{expert}.gate_proj",
    "mlp.experts.{expert}.fc_2": "mlp.experts.{expert}.up_proj",
    "mlp.experts.{expert}.proj": "mlp.experts.{expert}.down_proj",
}
MIXTRAL_EXPERTS = {
    **USUAL,
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.{expert}.fc_1": "block_sparse_moe.experts.{expert}.w1",
    "mlp.experts.{expert}.fc_2": "block_sparse_moe.experts.{expert}.w3",
    "mlp.experts.{expert}.proj": "block_sparse_moe.experts.{expert}.w2",
}
TENSORS = {
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    "mixtral": MIXTRAL_EXPERTS,
    "qwen3_moe": QWEN_EXPERTS,
}
"""Tensors of a layer by type; those of all other types are ``USUAL``."""

SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "head_dim": "head_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "block_size",
    "rms_norm_eps": "norm_eps",
}
FIXED: dict[str, Any] = {
    **dict.fromkeys(("norm_1", "norm_2"), True),
    **dict.fromkeys(("bias", "lm_head_bias", "parallel_residual"), False),
    **dict.fromkeys(("rope_interleave", "shared_attention_norm"), False),
    **dict.fromkeys(("latent_attention", "first_k_dense_replace", "n_shared_expert"), None),
    **dict.fromkeys(("n_expert_groups", "n_topk_groups", "n_topk_scores_per_group"), None),
    "rotary_percentage": 1.0,
    "rope_condense_ratio": 1,
    "routed_scaling_factor": 1.0,
    "norm_qk_type": "default",
    "norm_class_name": "RMSNorm",
}
"""Settings with the same value in all types that are read here."""


NORMED = {"norm_qk": True}
DENSE = {"mlp_class_name": "LLaMAMLP", "attn_bias": False, "scale_embeddings": False}
DENSE |= {"norm_qk": False, "post_attention_norm": False, "post_mlp_norm": False}
SPARSE = {**DENSE, "mlp_class_name": "LLaMAMoE"}
GELU = {**DENSE, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True}
GELU |= {"name": "Gemma"}  # by which litgpt adds 1 to the weights of norms
NORMS_AFTER = {"post_attention_norm": True, "post_mlp_norm": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": {**DENSE, "attn_bias": True},
    "qwen3": DENSE | NORMED,
    "mixtral": SPARSE,
    "qwen3_moe": {**SPARSE, **NORMED, "norm_topk_prob": True},
    "gemma": GELU,
    "gemma2": GELU | NORMS_AFTER,
    "gemma3_text": GELU | NORMS_AFTER | NORMED,
}
"""Settings by type, as they are written."""

OWN = {
    "attention_bias": "attn_bias",
    "num_local_experts": "n_expert",
    "num_experts": "n_expert",
    "num_experts_per_tok": "n_expert_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "attn_logit_softcapping": "attention_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "query_pre_attn_scalar": "attention_scores_scalar",
}
"""Settings that some types have, by config keys."""


class LitGPT(LaidOut):
    """See ``Format``."""

    title, name, models = "litgpt", "litgpt", KINDS
    complete, beside = False, (CONFIG,)  # it has no settings of training, nor ids of tokens

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        return {WEIGHTS: ()} if folder.find(WEIGHTS) and folder.require(CONFIG) else {}

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[WeightFile]:
        """See ``Format``; fine-tuning saves the weights as ``model``."""
        _, select = open_saved(folder, WEIGHTS, KIND)
        return [select(lambda saved: plain_tensors(saved.get("model", saved)))]

    def config(self, folder: Folder, files: Sequence[Any]) -> Config:
        """See ``Format``."""
        (file,) = files
        where = folder.path / CONFIG
        stored = read_yaml(where, "the config")
        with explain_damage(f"{where} cannot be used", "correct it, or convert the model again"):
            config = _config(ForeignSettings(stored))
            embedding, head = (
                file.places[name] for name in ("transformer.wte.weight", "lm_head.weight")
            )
            config["tie_word_embeddings"] = embedding == head
            return config | {"dtype": TORCH_NAMES[main_dtype(file.tensors)]}

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        layer = TENSORS.get(config["model_type"], USUAL)
        tied = config["tie_word_embeddings"]
        names = NAMES | {
            f"transformer.h.{{layer}}.{k}": f"model.layers.{{layer}}.{v}" for k, v in layer.items()
        }
        held = [Held("lm_head.weight", ())] if tied else []  # the same numbers as the embedding
        held += [Held(f"{stored}.weight", (f"{name}.weight",)) for stored, name in names.items()]
        for end in ("weight", "bias"):
            inside = tuple(f"{name}.{end}" for name in QKV)
            held.append(Held(f"transformer.h.{{layer}}.attn.qkv.{end}", inside, ROWS))
            held.append(Held(f"transformer.h.{{layer}}.attn.attn.{end}", inside, ROWS, GROUPS))
        return held

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; one file, in which a tied head shares the embedding's numbers."""
        tensors = self.from_transformers(model, config)
        tied = {"lm_head.weight": "transformer.wte.weight"} if config["tie_word_embeddings"] else {}
        shard = archive_shard(WEIGHTS, tensors.tensors, tied)
        settings = yaml.safe_dump(_settings(config))
        return Output(tensors, [shard], {CONFIG: settings.encode()})


def _settings(config: Config) -> dict[str, Any]:
    """The settings of litgpt for a config of transformers, the reverse of ``_config``."""
    sizes = {stored: config[key] for key, stored in SIZES.items() if config.get(key) is not None}
    settings = FIXED | KINDS[config["model_type"]] | sizes
    settings |= {
        "n_query_groups": config.get("num_key_value_heads") or config["num_attention_heads"]
    }
    settings |= {"head_size": row_sizes(config)["head_dim"], "vocab_size": config["vocab_size"]}
    settings |= {stored: config[key] for key, stored in OWN.items() if config.get(key) is not None}
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        local = [int(kind == "sliding_attention") for kind in config["layer_types"]]
        settings |= {"rope_indices": local}
        settings["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    settings["rope_base"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        names = {"original_max_position_embeddings": "original_max_seq_len"}
        scaling = {
            names.get(k, k): v for k, v in rope.items() if k not in ("rope_type", "rope_theta")
        }
        settings["rope_adjustments"] = scaling
    if settings.get("mlp_class_name") == "GemmaMLP" and config.get("layer_types"):
        local = [int(kind == "sliding_attention") for kind in config["layer_types"]]
        settings |= {
            "sliding_window_size": config["sliding_window"],
            "sliding_window_indices": local,
        }
    return settings


def _config(settings: ForeignSettings) -> Config:
    """The config of transformers for litgpt's settings, without the dtype.

    Raises:
        ValueError: litgpt computes what no type here does.
    """
    config: Config = {key: settings.take(stored) for key, stored in SIZES.items()}
    layers = config["num_hidden_layers"]
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"n_layer is {layers!r}")
    settings.ignore("hf_config", "padding_multiple", "vocab_size")
    name = settings.take("name", "", str)
    for key, value in FIXED.items():
        settings.expect(key, value)
    kind, normed = settings.take("mlp_class_name", None, str), settings.take("norm_qk", False, bool)
    biased = settings.take("attn_bias", False, bool)
    window, local = settings.take("sliding_window_size"), settings.take("rope_local_base_freq")
    theta, scaling = settings.take("rope_base"), settings.take("rope_adjustments", None, dict)
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        scaled = {**scaling, "original_max_position_embeddings": scaling["original_max_seq_len"]}
        del scaled["original_max_seq_len"]
        rope = {**rope, **scaled, "rope_type": "llama3"}
    config["rope_parameters"] = rope
    sliding = _layers(settings.take("sliding_window_indices", None, list), layers, window)
    if ("Gemma" in name) != (kind == "GemmaMLP"):
        raise ValueError(f"litgpt adds 1 to norms if name has Gemma in it, and it is {name!r}")
    if kind == "GemmaMLP":
        _gemma(config, settings, normed, window, sliding)
        if normed:
            sliding_rope = {"rope_type": "default", "rope_theta": local or theta}
            config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding_rope}
            with_local = _layers(settings.take("rope_indices", None, list), layers, local)
            if with_local != sliding:
                raise ValueError("rope_indices differs from sliding_window_indices")
        elif local:
            raise ValueError("rope_local_base_freq is known with norm_qk alone")
        settings.expect("rope_indices", None)
    else:
        config |= _llama(settings, kind, normed, biased)
        settings.expect("attention_scores_scalar", None, config["head_dim"])
        settings.expect("attention_logit_softcapping", None)
        settings.expect("final_logit_softcapping", None)
        settings.expect("rope_indices", None)
        if window or local:
            raise ValueError(f"windows of a {kind} are not known")
    settings.expect("post_attention_norm", False)
    settings.expect("post_mlp_norm", False)
    settings.expect("scale_embeddings", kind == "GemmaMLP")
    settings.ignore("gelu_approximate", "n_expert", "n_expert_per_token")
    settings.ignore("norm_topk_prob", "moe_intermediate_size")
    settings.finish()
    return config


def _layers(indices: Any, layers: int, used: Any) -> list[bool]:
    """The layers with a window, or with the other base."""
    if not used:
        return [False] * layers
    return [bool(index) for index in indices][:layers] if indices else [True] * layers


def _gemma(
    config: Config, settings: ForeignSettings, normed: bool, window: Any, sliding: Sequence[bool]
) -> None:
    """Add what is in the config of a Gemma.

    Raises:
        ValueError: there is no such Gemma.
    """
    after_attention = settings.take("post_attention_norm", False, bool)
    after_mlp = settings.take("post_mlp_norm", False, bool)
    if after_attention != after_mlp or (normed and not after_mlp):
        raise ValueError("its norms are not those of a Gemma")
    activation = "hidden_activation" if after_mlp else "hidden_act"
    config |= {activation: "gelu_pytorch_tanh", "attention_bias": False}
    settings.expect("gelu_approximate", "tanh")
    if not after_mlp:
        config["model_type"] = "gemma"
        settings.expect("attention_logit_softcapping", None)
        settings.expect("final_logit_softcapping", None)
        settings.expect("attention_scores_scalar", None, config["head_dim"])
        if window:
            raise ValueError("a Gemma without norms after its MLPs has no window")
        return
    config["model_type"] = "gemma3_text" if normed else "gemma2"
    config["attn_logit_softcapping"] = settings.take("attention_logit_softcapping")
    config["final_logit_softcapping"] = settings.take("final_logit_softcapping")
    scalar = settings.take("attention_scores_scalar")
    config["query_pre_attn_scalar"] = scalar or config["head_dim"]
    config["layer_types"] = [f"{'sliding' if on else 'full'}_attention" for on in sliding]
    if window:
        config["sliding_window"] = window


def _llama(settings: ForeignSettings, kind: str, normed: bool, biased: bool) -> Config:
    """The type and other keys of a model with a gated MLP or experts."""
    silu = {"hidden_act": "silu"}
    if kind == "LLaMAMoE":
        count, used = settings.take("n_expert"), settings.take("n_expert_per_token")
        if not normed:
            more = {"num_local_experts": count, "sliding_window": None}
            return {**silu, "model_type": "mixtral", "num_experts_per_tok": used, **more}
        width = settings.take("moe_intermediate_size")
        more = {"num_experts": count, "moe_intermediate_size": width, "norm_topk_prob": True}
        more |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": biased}
        return {**silu, "model_type": "qwen3_moe", "num_experts_per_tok": used, **more}
    if kind != "LLaMAMLP":
        raise ValueError(f"mlp_class_name is {kind!r}, which is not known")
    if biased and not normed:
        return {**silu, "model_type": "qwen2", "use_sliding_window": False}
    return {**silu, "model_type": "qwen3" if normed else "llama", "attention_bias": biased}


FORMAT = LitGPT()
