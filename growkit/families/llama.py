"""Llama: RMSNorm before each block, rotary grouped-query attention, gated MLP; and SmolLM3.

SmolLM3 has no rotary embedding in every fourth layer, which shows in no tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/llama
https://github.com/huggingface/transformers/tree/main/src/transformers/models/smollm3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import (
    DiffForm,
    Multiple,
    Norm,
    Tensor,
    When,
    is_set,
    linear,
    tied,
    untied,
)
from growkit.families.family import LISTS, Family

attention_bias = is_set("attention_bias")

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."

SKELETON_AXES = {
    "vocab_size": ("vocab",),
    "hidden_size": ("hidden",),
    "intermediate_size": ("ffn",),
    "num_hidden_layers": ("layers",),
}
"""Sizes of the skeleton, without those of the attention."""

HIDDEN_NORM = Norm("hidden", "rms_norm_eps")


def attention(
    bias: When | None = None, output_bias: When | None = None, output: str = "o_proj"
) -> tuple[Tensor, ...]:
    """The projections of grouped-query attention."""
    return (
        *linear(ATTENTION + "q_proj", "heads.head_dim <- hidden", bias),
        *linear(ATTENTION + "k_proj", "kv_heads.head_dim <- hidden", bias),
        *linear(ATTENTION + "v_proj", "kv_heads.head_dim <- hidden", bias),
        *linear(ATTENTION + output, "hidden <- heads.head_dim", output_bias),
    )


def gated_mlp(bias: When | None = None) -> tuple[Tensor, ...]:
    """The tensors of the MLP."""
    return (
        *linear(MLP + "gate_proj", "ffn <- hidden", bias),
        *linear(MLP + "up_proj", "ffn <- hidden", bias),
        *linear(MLP + "down_proj", "hidden <- ffn", bias),
    )


def qk_norms(norm: Norm, offset: float = 0.0) -> tuple[Tensor, ...]:
    """Norms of each query and key head, with one weight for all."""
    return tuple(
        Tensor(f"{ATTENTION}{each}_norm.weight", "head_dim", norm=norm, offset=offset)
        for each in "qk"
    )


def skeleton(attention: tuple[Tensor, ...], mlp: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Llama's tensors around an attention and an MLP."""
    return (
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        Tensor(LAYER + "input_layernorm.weight", "hidden", norm=HIDDEN_NORM),
        *attention,
        Tensor(LAYER + "post_attention_layernorm.weight", "hidden", norm=HIDDEN_NORM),
        *mlp,
        # A tied head is the embedding, whose columns are copied, not split. The norm before it
        # splits what the head reads instead: logits = Σ_c E (α_c · g ⊙ x̂).
        Tensor("model.norm.weight", "<- hidden", tied, norm=HIDDEN_NORM),
        Tensor("model.norm.weight", "hidden", untied, norm=HIDDEN_NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    )


SOFTMAX = DiffForm(
    switches={
        "num_noise_heads": 0,
        "head_norm": "none",
        "head_output_scale": "none",
        "integral": "none",
        "qk_projection": "full",
    }
)
"""Softmax attention as a DIFF Transformer without noise heads."""

BASE = Family(
    name="Llama-like",
    model_types=(),
    axes={
        **SKELETON_AXES,
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("kv_heads",),
        "head_dim": ("head_dim",),
    },
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    tensors=skeleton(attention(attention_bias, attention_bias), gated_mlp()),
    grouped=frozenset({"heads", "kv_heads"}),
    served={"heads": ("kv_heads",)},
    multiples=(
        Multiple(
            "num_attention_heads",
            "num_key_value_heads",
            "because each key-value head serves a whole group of query heads",
        ),
    ),
    recomputed=("rotary_emb.inv_freq",),
    duplicates={"lm_head.weight": "model.embed_tokens.weight"},
)
"""Common part of families with Llama's attention; no family itself."""

BASE_WITH_MLP_BIAS = replace(
    BASE,
    tensors=skeleton(attention(attention_bias, attention_bias), gated_mlp(is_set("mlp_bias"))),
)

LLAMA = replace(
    BASE_WITH_MLP_BIAS,
    name="Llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    form=SOFTMAX,
    multiples=(
        *BASE.multiples,
        Multiple("hidden_size", "num_attention_heads", "because LlamaConfig accepts nothing else"),
    ),
)


def _rotated(config: Config) -> list[int]:
    """Which layers have a rotary embedding by default: all except every fourth."""
    interval = config.get("no_rope_layer_interval", 4)
    return [int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])]


def _layer_types(config: Config) -> list[str]:
    windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return [
        "full_attention" if rotated or not windows else "sliding_attention"
        for rotated in config["no_rope_layers"][: config["num_hidden_layers"]]
    ]


SMOLLM3 = replace(
    BASE_WITH_MLP_BIAS,
    name="SmolLM3",
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    defaults={
        **BASE.defaults,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "no_rope_layers": _rotated,
        "layer_types": _layer_types,
    },
    lists=LISTS | {"no_rope_layers"},
)

FAMILIES = {"llama": LLAMA, "smollm3": SMOLLM3}
