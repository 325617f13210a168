"""DeepSeek-V2: keys and values out of a latent, experts beside shared ones, first layers dense.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/deepseek_v2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from growkit.base.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor
from growkit.families.experts import Experts
from growkit.families.family import Family
from growkit.families.llama import (
    ATTENTION,
    MLP,
    SKELETON_AXES,
    attention_bias,
    gated_mlp,
    skeleton,
)
from growkit.families.qwen3_moe import experts, only
from growkit.families.sizes import Axes


def _low_rank(config: Config) -> bool:
    """Queries come out of a latent as well."""
    return config.get("q_lora_rank") is not None


def _full_rank(config: Config) -> bool:
    return not _low_rank(config)


def _low_rank_bias(config: Config) -> bool:
    return _low_rank(config) and attention_bias(config)


def _query_latent(config: Config) -> Axes:
    return ("query_latent",) if _low_rank(config) else ()


def _mlp_bias(config: Config) -> bool:
    return bool(config["mlp_bias"])


def _dense(config: Config, layer: int) -> bool:
    return bool(layer < config["first_k_dense_replace"])


def sparse(config: Config, layer: int) -> bool:
    """The layer has experts."""
    return not _dense(config, layer)


def arranged(config: Config, layers: Sequence[int]) -> Config:
    """How many layers are dense, in a model whose layers come from these: the first ones."""
    return {"first_k_dense_replace": sum(_dense(config, layer) for layer in layers)}


ATTENTION_TENSORS = (
    Tensor(ATTENTION + "q_proj.weight", "heads.(nope + rope) <- hidden", _full_rank),
    Tensor(ATTENTION + "q_a_proj.weight", "query_latent <- hidden", _low_rank),
    Tensor(ATTENTION + "q_a_proj.bias", "query_latent", _low_rank_bias),
    Tensor(
        ATTENTION + "q_a_layernorm.weight",
        "query_latent",
        _low_rank,
        norm=Norm("query_latent", None),
    ),
    Tensor(ATTENTION + "q_b_proj.weight", "heads.(nope + rope) <- query_latent", _low_rank),
    Tensor(ATTENTION + "kv_a_proj_with_mqa.weight", "latent + rope <- hidden"),
    Tensor(ATTENTION + "kv_a_proj_with_mqa.bias", "latent + rope", attention_bias),
    Tensor(ATTENTION + "kv_a_layernorm.weight", "latent", norm=Norm("latent", None)),
    Tensor(ATTENTION + "kv_b_proj.weight", "heads.(nope + value) <- latent"),
    Tensor(ATTENTION + "o_proj.weight", "hidden <- heads.value"),
    Tensor(ATTENTION + "o_proj.bias", "hidden", attention_bias),
)


def _shared(tensor: Tensor) -> Tensor:
    return Tensor(
        tensor.name.replace(MLP, MLP + "shared_experts."),
        tensor.pattern.replace("ffn", "shared.expert_ffn"),
        tensor.when,
        dense=(tensor.name,),
    )


def mla_with_experts(
    bias: Callable[[Config], bool], *router: Tensor, stacked: bool
) -> tuple[Tensor, ...]:
    """All tensors; those of a router beside its weight differ between versions."""
    mlp = gated_mlp(bias)
    return skeleton(
        ATTENTION_TENSORS,
        (
            *only(_dense, mlp),
            *only(sparse, map(_shared, mlp)),
            *only(sparse, router),
            *experts("expert_ffn", sparse, stacked=stacked),
        ),
    )


EXPERTS = Experts(
    width="expert_ffn",
    scaling="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    float32=True,
)

FAMILY = Family(
    name="DeepSeek-V2",
    model_types=("deepseek_v2",),
    architecture="DeepseekV2ForCausalLM",
    axes={
        **SKELETON_AXES,
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("heads",),
        "q_lora_rank": _query_latent,
        "kv_lora_rank": ("latent",),
        "qk_nope_head_dim": ("nope",),
        "qk_rope_head_dim": ("rope",),
        "v_head_dim": ("value",),
        "moe_intermediate_size": ("expert_ffn",),
        "n_shared_experts": ("shared",),
        "n_routed_experts": ("experts",),
    },
    kinds={"expert_ffn": "ffn"},
    arranged=arranged,
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "n_group": None,
        "topk_group": None,
        "rms_norm_eps": 1e-6,
    },
    constants={"two": 2},
    may_be_zero=frozenset({"n_shared_experts"}),
    experts=EXPERTS,
    tensors=mla_with_experts(_mlp_bias, stacked=False),
    other_forms=(mla_with_experts(_mlp_bias, stacked=True),),
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because its config accepts nothing else"),
    ),
    recomputed=("rotary_emb.inv_freq",),
    duplicates={"lm_head.weight": "model.embed_tokens.weight"},
)
