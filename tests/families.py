"""Random models of every family, and random growths of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from tests.files import edit_weights, listed
from tests.models import relative_error, save_random, seeded

Config = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How random models of a type are made, and what can be done to them.

    Attributes:
        any: a random config.
        hidden: factors by which hidden can grow.
        kv: whether it has key-value heads of their own, so that these can stay as they are.
        apart: whether heads can grow apart from hidden.
        grows: whether hidden can grow at all, in a model of this config.
        by_hidden: whether the width of its blocks is a multiple of hidden.
        ffn: whether the MLP can have a width of its own.
        centred: whether its norms take the mean away, which zeros beside it would move.
    """

    any: Callable[[Random], Config]
    hidden: tuple[int, ...] = (2, 3)
    kv: bool = True
    apart: bool = True
    grows: Callable[[Config], bool] = lambda config: True
    by_hidden: bool = False
    ffn: bool = True
    centred: bool = False


SIZES: Config = {"vocab_size": 29, "num_hidden_layers": 2, "max_position_embeddings": 64}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def coin(choose: Random) -> bool:
    return choose.random() < 0.5


def softmax(choose: Random, *switches: str, head_dim: bool = True, **more: Any) -> Config:
    """Sizes by the names that most configs have; of the switches, each is on or off."""
    kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2])
    heads, width = kv_heads * group, choose.choice([4, 8])
    sizes = {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": choose.choice([7, 24]),
        "tie_word_embeddings": coin(choose),
    }
    if head_dim:
        sizes |= {"hidden_size": choose.choice([12, 16, 20]), "head_dim": width}
    return SIZES | sizes | {switch: coin(choose) for switch in switches} | more


def windows(choose: Random) -> Config:
    """A window in some layers."""
    types = [choose.choice(["sliding_attention", "full_attention"]) for _ in range(2)]
    return {"layer_types": types, "sliding_window": 5}


MOE: Config = {"intermediate_size": 16, "num_experts_per_tok": 2}
ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def latent(choose: Random, *switches: str, **more: Any) -> Config:
    """Multi-head latent attention."""
    heads = choose.choice([1, 2, 3])
    return SIZES | {
        **MOE,
        "hidden_size": 72,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": choose.choice([None, 7]),
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_intermediate_size": choose.choice([8, 16]),
        "n_shared_experts": choose.choice([1, 2]),
        "n_routed_experts": 4,
        "first_k_dense_replace": choose.choice([0, 1]),
        "attention_bias": coin(choose),
        "tie_word_embeddings": coin(choose),
        **{switch: coin(choose) for switch in switches},
        **more,
    }


def opt(choose: Random) -> Config:
    """Norms before or behind the blocks, and an embedding of its own width in some."""
    switches = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")
    sizes = softmax(choose, *switches, head_dim=False)
    del sizes["num_key_value_heads"]
    sizes["ffn_dim"] = sizes.pop("intermediate_size")
    return sizes | {
        "word_embed_proj_dim": choose.choice([sizes["hidden_size"], 10]),
        "_remove_final_layer_norm": choose.random() < 0.2,
    }


def opt_grows(config: Config) -> bool:
    """Something with a weight stands before a tied head."""
    norm = not config["do_layer_norm_before"] or not config["_remove_final_layer_norm"]
    apart = config["word_embed_proj_dim"] != config["hidden_size"]
    weight = config["layer_norm_elementwise_affine"]
    return not config["tie_word_embeddings"] or apart or (norm and weight)


def falcon(choose: Random) -> Config:
    """In all three orders."""
    switches = ("new_decoder_architecture", "multi_query", "parallel_attn", "bias")
    sizes = softmax(choose, *switches, head_dim=False)
    sizes["ffn_hidden_size"] = sizes.pop("intermediate_size")
    kv_heads = sizes.pop("num_key_value_heads")
    if sizes["new_decoder_architecture"]:
        sizes |= {"num_kv_heads": kv_heads, "num_ln_in_parallel_attn": choose.choice([1, 2])}
        sizes["parallel_attn"] = True
    return sizes | {"alibi": choose.random() < 0.1}


def bloom(choose: Random) -> Config:
    """Any number of heads: slopes are of two kinds where it is no power of two."""
    heads = choose.choice([1, 2, 3, 5, 6, 8])
    return SIZES | {
        "hidden_size": heads * choose.choice([2, 3]),
        "n_head": heads,
        "tie_word_embeddings": coin(choose),
        "apply_residual_connection_post_layernorm": coin(choose),
    }


def gpt2(choose: Random) -> Config:
    heads = choose.choice([1, 2, 3])
    return SIZES | {
        "n_embd": heads * choose.choice([4, 6]),
        "n_inner": choose.choice([None, 7, 24]),
        "n_head": heads,
        "n_positions": 64,
        "scale_attn_by_inverse_layer_idx": coin(choose),
        "activation_function": choose.choice(["gelu_new", "relu"]),
        "tie_word_embeddings": coin(choose),
    }


def usual(*switches: str, **more: Any) -> Callable[[Random], Config]:
    """Sizes as in ``softmax``; of ``more``, functions are drawn from."""

    def draw(choose: Random) -> Config:
        drawn = {key: each(choose) if callable(each) else each for key, each in more.items()}
        return softmax(choose, *switches, **drawn)

    return draw


def one_of(*values: Any) -> Callable[[Random], Any]:
    return lambda choose: choose.choice(values)


def mamba(choose: Random) -> Config:
    return SIZES | {
        "hidden_size": choose.choice([12, 20]),
        "expand": choose.choice([1, 2]),
        "state_size": 5,
        "time_step_rank": 3,
        "conv_kernel": choose.choice([2, 4]),
        "use_bias": coin(choose),
        "use_conv_bias": coin(choose),
        "tie_word_embeddings": coin(choose),
    }


WINDOWS: Config = {"layer_types": lambda c: windows(c)["layer_types"], "sliding_window": 5}
WINDOW: Config = {"sliding_window": 5, "max_window_layers": 1}
SCALES: Config = {"embedding_multiplier": 1.7, "residual_multiplier": 0.8}
SCALES |= {"attention_multiplier": 0.3, "logits_scaling": 1.3}
FEW: Config = {**MOE, "num_experts": 4}
LOCAL: Config = {**MOE, "num_local_experts": 4, "hidden_size": 16}
QWEN: Config = {**MOE, "moe_intermediate_size": one_of(8, 16), "num_experts": one_of(2, 4)}
QWEN |= {"decoder_sparse_step": one_of(1, 2), "hidden_size": 16}
TOGETHER: Config = {"apart": False, "centred": True}
BIASES = ("attention_bias", "mlp_bias")
IDENTITY = {"do_layer_norm_before": True, "apply_residual_connection_post_layernorm": False}
"""Without these OPT and BLOOM have no blocks that change nothing."""

DELTA = ["linear_attention", "full_attention"]

FAMILIES: dict[str, Kind] = {
    "gpt2": Kind(gpt2, kv=False, **TOGETHER),
    "gemma": Kind(usual("attention_bias"), hidden=(4, 16)),
    "mixtral": Kind(usual(**LOCAL | {"num_local_experts": one_of(2, 4)})),
    "qwen2": Kind(usual(head_dim=coin)),
    "qwen3": Kind(usual("attention_bias", "use_sliding_window", **WINDOW)),
    "smollm3": Kind(usual(*BIASES, head_dim=coin, no_rope_layers=lambda c: [1, int(coin(c))])),
    "ministral": Kind(usual(**WINDOWS)),
    "ministral3": Kind(softmax),
    "olmo": Kind(
        usual("attention_bias", clip_qkv=one_of(None, 0.8), head_dim=coin),
        grows=lambda config: not config["tie_word_embeddings"],
        centred=True,
    ),
    "olmo2": Kind(usual("attention_bias", head_dim=coin)),
    "olmo3": Kind(usual("attention_bias", head_dim=coin, **WINDOWS)),
    "phi3": Kind(usual(head_dim=coin)),
    "granite": Kind(usual(*BIASES, head_dim=coin, **SCALES)),
    "falcon_h1": Kind(
        usual(
            *BIASES,
            *("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "projectors_bias"),
            head_dim=coin,
            mamba_d_ssm=12,
            mamba_n_heads=one_of(2, 3),
            mamba_n_groups=1,
            mamba_d_state=4,
            mamba_chunk_size=8,
        )
    ),
    "starcoder2": Kind(usual("use_bias", head_dim=coin), centred=True),
    "nemotron": Kind(usual(*BIASES, head_dim=coin), centred=True),
    "stablelm": Kind(
        usual("use_qkv_bias", "use_parallel_residual", "qk_layernorm", head_dim=False), **TOGETHER
    ),
    "phi": Kind(usual("qk_layernorm", head_dim=False), **TOGETHER),
    "gpt_neox": Kind(
        usual("attention_bias", "use_parallel_residual", head_dim=False), kv=False, **TOGETHER
    ),
    "qwen3_moe": Kind(usual("attention_bias", **QWEN, mlp_only_layers=one_of([], [0]))),
    "qwen3_5_text": Kind(
        usual(
            "attention_bias",
            layer_types=one_of(DELTA, DELTA[::-1]),
            full_attention_interval=2,  # without these, some layer has a cache with a length
            linear_num_key_heads=2,
            linear_num_value_heads=one_of(2, 4),
            linear_key_head_dim=4,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=one_of(2, 4),
        )
    ),
    "qwen2_moe": Kind(usual("qkv_bias", **QWEN, shared_expert_intermediate_size=one_of(8, 24))),
    "olmoe": Kind(usual("attention_bias", **FEW, head_dim=False), apart=False),
    "flex_olmo": Kind(usual("attention_bias", **FEW, norm_topk_prob=coin, hidden_size=16)),
    "granitemoe": Kind(usual("attention_bias", **LOCAL, logits_scaling=1.3)),
    "gpt_oss": Kind(usual("attention_bias", **LOCAL, **WINDOWS, **ROPE)),
    "deepseek_v2": Kind(lambda c: latent(c, "mlp_bias"), kv=False),
    "deepseek_v3": Kind(lambda c: latent(c, n_group=2, topk_group=1), kv=False),
    "gemma2": Kind(usual("attention_bias", **WINDOWS, hidden_size=72), hidden=(4,)),
    "gemma3_text": Kind(usual("attention_bias", **WINDOWS, hidden_size=72), hidden=(4,)),
    "cohere": Kind(usual("attention_bias", "use_qk_norm", head_dim=coin), centred=True),
    "cohere2": Kind(usual("attention_bias", head_dim=False, **WINDOWS), **TOGETHER),
    "opt": Kind(opt, kv=False, grows=opt_grows, **TOGETHER),
    "falcon": Kind(falcon, kv=False, grows=lambda config: not config["alibi"], **TOGETHER),
    "bloom": Kind(bloom, kv=False, ffn=False, **TOGETHER),
    "mamba": Kind(mamba, kv=False, apart=False, by_hidden=True),
}
"""By ``model_type``."""


def diff(choose: Random, **more: Any) -> Config:
    return softmax(choose, "attention_bias", head_dim=False) | {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": choose.choice([2, 4]),
        **more,
    }


def diff_transformer(choose: Random) -> Config:
    switches = {
        "integral": choose.choice(["none", "causal"]),
        "gamma": choose.choice(["unified", "gated"]),
        "head_norm": choose.choice(["affine", "plain", "none"]),
        "lambda_type": choose.choice(["vectors", "projected"]),
        "hidden_act": choose.choice(["silu", "poly_norm"]),
        "num_noise_heads": 2,
    }
    if coin(choose):
        switches |= {"qk_projection": "shared", "shared_rank": choose.choice([2, [1, 2, 3, 1]])}
    return diff(choose, num_key_value_heads=2, **switches)


CONFIGS: dict[str, Callable[[Random], Config]] = {
    **{kind: each.any for kind, each in FAMILIES.items()},
    "llama": lambda c: softmax(c, "attention_bias", "mlp_bias", head_dim=False),
    "mistral": lambda c: softmax(c, sliding_window=c.choice([None, 5])),
    "gpt2": lambda c: gpt2(c) | {"scale_attn_by_inverse_layer_idx": False},
    "diffllama": diff,
    "diff_transformer": diff_transformer,
}
"""By ``model_type``; also of the types that have tests of their own."""


class Case:
    """A random model of a kind, and a random growth of it."""

    def __init__(self, kind: Kind, choose: Random) -> None:
        self.kind = kind
        self.config = kind.any(choose)
        self.least = kind.hidden[0]
        self.dtype = choose.choice([torch.float32, torch.bfloat16])
        self.grows = kind.grows(self.config)
        self.first = "hidden" if self.grows else "ffn"
        self.symmetry = choose.choice(["break", "keep"])
        self.class_names = choose.random() < 0.3
        self.sizes = self._sizes(choose)
        self.base_names = choose.random() < 0.2

    def _sizes(self, choose: Random) -> dict[str, str]:
        still = [1] if self.kind.ffn else []
        factors = [*self.kind.hidden, self.kind.hidden[0], *still]
        hidden = choose.choice(factors) if self.grows else 1
        sizes: dict[str, int] = {}
        if self.kind.ffn:
            sizes["ffn"] = choose.choice([2, 3] if hidden == 1 else [1, 2, 3])
        if self.kind.by_hidden:
            sizes["ffn"] *= hidden
        if hidden > 1:
            sizes["hidden"] = hidden
        if self.kind.apart and self.grows and coin(choose):
            sizes["heads"] = choose.choice([1, 2, 3])
        if self.kind.kv and self.grows and coin(choose):
            sizes["kv_heads"] = 1
        return {name: f"x{factor}" for name, factor in sizes.items()}


def save(folder: Path, case: Case, seed: int) -> Path:
    """A lively random model, as transformers saves it."""
    kind = next(name for name, each in FAMILIES.items() if each is case.kind)
    return save_lively(folder, kind, case.config, seed, case.dtype)


def save_lively(folder: Path, kind: str, config: Config, seed: int, dtype: torch.dtype) -> Path:
    """A random model, also in the buffers that a file holds."""
    save_random(folder, CONFIG_MAPPING[kind](**config), seed, dtype)
    with edit_weights(folder) as tensors:
        for name, each in tensors.items():
            if name.endswith("e_score_correction_bias"):  # it starts as zeros
                each.copy_(torch.linspace(-0.3, 0.2, len(each)))
    return folder


def with_class_names(folder: Path, dtype: torch.dtype) -> None:
    """The same model with the tensors as the class has them, where files have others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def with_base_names(folder: Path) -> None:
    """The same model with the tensors as the class without a head has them."""
    with edit_weights(folder) as tensors:
        prefix = next(name for name in tensors if ".0." in name).partition(".")[0] + "."
        for name in [*tensors]:
            tensors[name.removeprefix(prefix)] = tensors.pop(name)


def grow_any(kind: str, seed: int, folder: Path) -> float:
    """Grow a random model; the relative error of its logits in strict float64."""
    case = Case(FAMILIES[kind], seeded(seed))
    source, out = save(folder / "source", case, seed), folder / "out"
    if case.class_names:
        with_class_names(source, case.dtype)
    if case.base_names:
        with_base_names(source)
    growkit.grow(source, out, symmetry=case.symmetry, verify=False, **case.sizes)
    return relative_error(source, out)


DENSE: dict[str, str] = listed("families", "experts of dense models")
"""By the ``model_type`` of a dense model, that of the one with experts."""

SPARSE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
)
"""Types with experts."""


def dense_config(kind: str, choose: Random) -> Config:
    """A random config of a dense model, whose MLP can be cut into four."""
    width = choose.choice([8, 12, 24])
    if kind == "deepseek_v3":
        return {**latent(choose, first_k_dense_replace=2), "intermediate_size": width}
    switches = ("attention_bias",) if kind in ("qwen3", "olmo2", "granite") else ()
    apart = kind != "llama" and coin(choose)
    sizes = softmax(choose, *switches, head_dim=kind == "qwen3" or apart)
    if kind == "mistral":
        sizes["sliding_window"] = choose.choice([None, 5])
    return {**sizes, "intermediate_size": width}


def arrangement(choose: Random) -> dict[str, int]:
    """Experts, how many are chosen, and into how many the MLP is cut."""
    pieces = choose.choice([1, 2, 4])
    chosen = choose.choice([1, 2, 3] if pieces > 1 else [2, 3])
    groups = chosen + choose.choice([0, 1, 3])
    return {"experts": groups * pieces, "top_k": chosen * pieces, "granularity": pieces}


def save_dense(kind: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A lively random dense model."""
    return save_random(
        folder, CONFIG_MAPPING[kind](**dense_config(kind, seeded(seed))), seed, dtype
    )


def upcycle_any(kind: str, seed: int, folder: Path) -> float:
    """Upcycle a random model; the relative error of its logits in strict float64."""
    choose = seeded(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    source, out = save_dense(kind, seed, folder / "source", dtype), folder / "out"
    growkit.grow(source, out, method="upcycle", seed=seed, verify=False, **arrangement(choose))
    assert json.loads((out / "config.json").read_text())["model_type"] == DENSE[kind]
    return relative_error(source, out)


def save_sparse(kind: str, seed: int, folder: Path) -> Path:
    """A lively random model with experts, one by one on disk or as its class has them."""
    choose = seeded(seed)
    config = FAMILIES[kind].any(choose)
    if kind == "deepseek_v3":
        config["norm_topk_prob"] = coin(choose)
    if kind == "deepseek_v2" and coin(choose):
        config |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    dtype = choose.choice([torch.float32, torch.bfloat16])
    save_random(folder, CONFIG_MAPPING[kind](**config), seed, dtype)
    if coin(choose):
        with_class_names(folder, dtype)
    return folder


def copy_any(kind: str, seed: int, folder: Path) -> float:
    """Copy the experts of a random model; the relative error as above."""
    source, out = save_sparse(kind, seed, folder / "source"), folder / "out"
    choose = seeded(seed + 1000)
    symmetry = choose.choice(["break", "keep"])
    factor = choose.choice([2, 4] if symmetry == "break" else [2, 3])
    options = {"experts": f"x{factor}", "symmetry": symmetry, "seed": seed}
    growkit.grow(source, out, method="experts", verify=False, **options)
    return relative_error(source, out)


# Llamas and DiffLlamas with all their settings.

STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
ROPES: list[Config | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED},
    {"rope_type": "yarn", **STRETCHED},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def llama(choose: Random) -> tuple[Config, dict[str, str]]:
    """A random legal config of this type, and legal sizes to grow it to."""
    config = softmax(
        choose,
        *("attention_bias", "mlp_bias"),
        head_dim=False,
        num_hidden_layers=choose.choice([1, 2, 3]),
        rms_norm_eps=choose.choice([1e-6, 1e-5, 1e-2]),
        hidden_act=choose.choice(["silu", "gelu", "relu"]),
        rope_parameters=choose.choice(ROPES),
    )
    config["head_dim"] = choose.choice([4, 6, 8])
    return config, legal_sizes(choose, config)


def diffllama(choose: Random) -> tuple[Config, dict[str, str]]:
    """A random legal config of this type, and legal sizes to grow it to."""
    kv_pairs = choose.choice([1, 2, 3])
    config = softmax(
        choose,
        "attention_bias",
        hidden_size=choose.choice([12, 16, 20]),
        num_hidden_layers=choose.choice([1, 2, 3]),
        num_attention_heads=2 * kv_pairs * choose.choice([1, 2, 4]),
        num_key_value_heads=2 * kv_pairs,
        head_dim=choose.choice([4, 6]),
        rms_norm_eps=choose.choice([1e-5, 1e-2]),
        lambda_std_dev=0.3,
    )
    return config, legal_sizes(choose, config, in_hidden=False)


def legal_sizes(choose: Random, config: Config, in_hidden: bool = True) -> dict[str, str]:
    """Sizes by which a model of a config can grow; heads divide hidden in some classes."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    while True:
        hidden_x, heads_x, kv_x = (choose.choice([1, 2, 3, 4]) for _ in range(3))
        sizes = {"hidden": hidden_x, "ffn": choose.choice([1, 2, 3]), "heads": heads_x}
        sizes["kv_heads"] = kv_x
        legal = not in_hidden or config["hidden_size"] * hidden_x % (heads * heads_x) == 0
        if legal and heads // kv_heads * heads_x % kv_x == 0 and max(sizes.values()) > 1:
            return {name: f"x{factor}" for name, factor in sizes.items()}
