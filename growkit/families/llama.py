"""Llama: RMSNorm before each block, rotary grouped-query attention, gated MLP.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/llama
"""

from __future__ import annotations

from collections.abc import Callable

from growkit.base.tensors import Config
from growkit.families.description import DiffForm, Multiple, Norm, Tensor, always
from growkit.families.family import Family


def tied(config: Config) -> bool:
    """The output head is the embedding."""
    return bool(config["tie_word_embeddings"])


def untied(config: Config) -> bool:
    """The output head has a weight of its own."""
    return not tied(config)


def attention_bias(config: Config) -> bool:
    """q, k, v and o have biases."""
    return bool(config["attention_bias"])


def mlp_bias(config: Config) -> bool:
    """gate, up and down have biases."""
    return bool(config["mlp_bias"])


ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."

SKELETON_AXES = {
    "vocab_size": ("vocab",),
    "hidden_size": ("hidden",),
    "intermediate_size": ("ffn",),
    "num_hidden_layers": ("layers",),
}
"""The sizes of whatever has Llama's tensors around its attention."""


def gated_mlp(bias: Callable[[Config], bool]) -> tuple[Tensor, ...]:
    """The tensors of the MLP."""
    return (
        Tensor(MLP + "gate_proj.weight", "ffn <- hidden"),
        Tensor(MLP + "gate_proj.bias", "ffn", bias),
        Tensor(MLP + "up_proj.weight", "ffn <- hidden"),
        Tensor(MLP + "up_proj.bias", "ffn", bias),
        Tensor(MLP + "down_proj.weight", "hidden <- ffn"),
        Tensor(MLP + "down_proj.bias", "hidden", bias),
    )


MLP_WITHOUT_BIAS = tuple(tensor for tensor in gated_mlp(mlp_bias) if tensor.when is always)


HIDDEN_NORM = Norm("hidden", "rms_norm_eps")


def skeleton(attention: tuple[Tensor, ...], mlp: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Llama's tensors around an attention and an MLP."""
    return (
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        Tensor("model.layers.{layer}.input_layernorm.weight", "hidden", norm=HIDDEN_NORM),
        *attention,
        Tensor("model.layers.{layer}.post_attention_layernorm.weight", "hidden", norm=HIDDEN_NORM),
        *mlp,
        # A tied output head is the embedding, whose columns are copied. What is read from the
        # copies must then be shared out one step earlier: logits = Σ_c E (α_c · g ⊙ x̂).
        Tensor("model.norm.weight", "<- hidden", tied, norm=HIDDEN_NORM),
        Tensor("model.norm.weight", "hidden", untied, norm=HIDDEN_NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    )


def layer_norm(
    name: str, norm: Norm, when: Callable[[Config], bool] = always
) -> tuple[Tensor, ...]:
    """Weight and bias of a LayerNorm over hidden, for families that have these instead."""
    return (
        Tensor(name + ".weight", "hidden", when, norm=norm),
        Tensor(name + ".bias", "hidden", when),
    )


def last_layer_norm(name: str, norm: Norm) -> tuple[Tensor, ...]:
    """Likewise of the one before the head: what a tied head reads is shared out in it."""
    return (
        Tensor(name + ".weight", "<- hidden", tied, norm=norm),
        Tensor(name + ".bias", "<- hidden", tied),
        *layer_norm(name, norm, untied),
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
"""Softmax attention is that of a DIFF Transformer without noise heads."""

FAMILY = Family(
    name="Llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    form=SOFTMAX,
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
    tensors=skeleton(
        (
            Tensor(ATTENTION + "q_proj.weight", "heads.head_dim <- hidden"),
            Tensor(ATTENTION + "q_proj.bias", "heads.head_dim", attention_bias),
            Tensor(ATTENTION + "k_proj.weight", "kv_heads.head_dim <- hidden"),
            Tensor(ATTENTION + "k_proj.bias", "kv_heads.head_dim", attention_bias),
            Tensor(ATTENTION + "v_proj.weight", "kv_heads.head_dim <- hidden"),
            Tensor(ATTENTION + "v_proj.bias", "kv_heads.head_dim", attention_bias),
            Tensor(ATTENTION + "o_proj.weight", "hidden <- heads.head_dim"),
            Tensor(ATTENTION + "o_proj.bias", "hidden", attention_bias),
        ),
        gated_mlp(mlp_bias),
    ),
    grouped=frozenset({"heads", "kv_heads"}),
    served={"heads": ("kv_heads",)},
    multiples=(
        Multiple(
            "num_attention_heads",
            "num_key_value_heads",
            "because each key-value head serves a whole group of query heads",
        ),
        Multiple("hidden_size", "num_attention_heads", "because LlamaConfig accepts nothing else"),
    ),
    recomputed=("rotary_emb.inv_freq",),
    duplicates={"lm_head.weight": "model.embed_tokens.weight"},
)
