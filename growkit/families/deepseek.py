"""DeepSeek-V2 and V3: keys and values from a latent, shared experts, and dense first layers.

V3 has a correction for every router.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/deepseek_v2
https://github.com/huggingface/transformers/tree/main/src/transformers/models/deepseek_v3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import (
    NEW,
    Dense,
    Experts,
    Multiple,
    Norm,
    Tensor,
    When,
    is_set,
    is_unset,
    linear,
    only,
)
from growkit.families.family import Family
from growkit.families.llama import (
    ATTENTION,
    BASE,
    MLP,
    SKELETON_AXES,
    attention_bias,
    gated_mlp,
    skeleton,
)
from growkit.families.qwen import experts


def _low_rank(config: Config) -> bool:
    """Models whose queries come from a latent as well."""
    return config.get("q_lora_rank") is not None


def _full_rank(config: Config) -> bool:
    return not _low_rank(config)


def _dense(config: Config, layer: int) -> bool:
    return bool(layer < config["first_k_dense_replace"])


def _sparse(config: Config, layer: int) -> bool:
    """Layers with experts."""
    return not _dense(config, layer)


def _arranged(config: Config, layers: Sequence[int]) -> Config:
    return {"first_k_dense_replace": sum(_dense(config, layer) for layer in layers)}


ATTENTION_TENSORS = (
    *linear(ATTENTION + "q_proj", "heads.(nope + rope) <- hidden", when=_full_rank),
    *linear(ATTENTION + "q_a_proj", "query_latent <- hidden", attention_bias, _low_rank),
    Tensor(
        ATTENTION + "q_a_layernorm.weight",
        "query_latent",
        _low_rank,
        norm=Norm("query_latent", None),
    ),
    *linear(ATTENTION + "q_b_proj", "heads.(nope + rope) <- query_latent", when=_low_rank),
    *linear(ATTENTION + "kv_a_proj_with_mqa", "latent + rope <- hidden", attention_bias),
    Tensor(ATTENTION + "kv_a_layernorm.weight", "latent", norm=Norm("latent", None)),
    *linear(ATTENTION + "kv_b_proj", "heads.(nope + value) <- latent"),
    *linear(ATTENTION + "o_proj", "hidden <- heads.value", attention_bias),
)


def _shared(tensor: Tensor) -> Tensor:
    return Tensor(
        tensor.name.replace(MLP, MLP + "shared_experts."),
        tensor.pattern.replace("ffn", "shared.expert_ffn"),
        tensor.when,
        dense=(tensor.name,),
    )


def _tensors(bias: When | None, *router: Tensor, stacked: bool) -> tuple[Tensor, ...]:
    """All tensors; ``router`` are those of a router besides its weight."""
    mlp = gated_mlp(bias)
    return skeleton(
        ATTENTION_TENSORS,
        (
            *only(_dense, mlp),
            *only(_sparse, map(_shared, mlp)),
            *only(_sparse, router),
            *experts("expert_ffn", _sparse, stacked=stacked),
        ),
    )


DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    model_types=("deepseek_v2",),
    architecture="DeepseekV2ForCausalLM",
    axes={
        **SKELETON_AXES,
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("heads",),
        "q_lora_rank": lambda config: ("query_latent",) if _low_rank(config) else (),
        "kv_lora_rank": ("latent",),
        "qk_nope_head_dim": ("nope",),
        "qk_rope_head_dim": ("rope",),
        "v_head_dim": ("value",),
        "moe_intermediate_size": ("expert_ffn",),
        "n_shared_experts": ("shared",),
        "n_routed_experts": ("experts",),
    },
    kinds={"expert_ffn": "ffn"},
    arranged=_arranged,
    defaults={
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
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
    experts=Experts(
        width="expert_ffn",
        scaling="routed_scaling_factor",
        groups=("n_group", "topk_group"),
        float32=True,
    ),
    tensors=_tensors(is_set("mlp_bias"), stacked=False),
    other_forms=(_tensors(is_set("mlp_bias"), stacked=True),),
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because its config accepts nothing else"),
    ),
    recomputed=BASE.recomputed,
    duplicates=BASE.duplicates,
)

CORRECTION = Tensor(MLP + "gate.e_score_correction_bias", "experts", dense=NEW)

assert DEEPSEEK_V2.experts is not None

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepSeek-V3",
    model_types=("deepseek_v3",),
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEEPSEEK_V2.defaults,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    experts=replace(
        DEEPSEEK_V2.experts,
        alone=is_unset("norm_topk_prob"),
        dense={
            "deepseek_v3": Dense(
                when=lambda config: bool(
                    config["first_k_dense_replace"] >= config["num_hidden_layers"]
                )
            )
        },
        config={
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        part=0.5,
        beside=0.5,
        sizes=lambda width, pieces: {"shared": pieces},
    ),
    tensors=_tensors(None, CORRECTION, stacked=False),
    other_forms=(_tensors(None, CORRECTION, stacked=True),),
)

FAMILIES = {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3}
