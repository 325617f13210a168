"""BLOOM: LayerNorm, also of the embedding; heads have slopes (ALiBi) instead of positions.

The slope of a head follows from its number and from how many there are. All slopes of fewer heads
are among those of more, so that a head can stand where the class has its slope; heads between them
are copies that nothing reads yet.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/bloom
"""

from __future__ import annotations

from fractions import Fraction

from growkit.families.description import (
    Multiple,
    Norm,
    Tensor,
    always,
    is_set,
    last_layer_norm,
    layer_norm,
    linear,
    untied,
)
from growkit.families.family import Family

LAYER = "transformer.h.{layer}."
NORM = Norm("hidden", "layer_norm_epsilon", centred=True)


def slopes(heads: int) -> list[Fraction]:
    """Of every head, the power of ½ that its slope is."""
    power = 1 << (heads.bit_length() - 1)
    first = [Fraction(8 * number, power) for number in range(1, power + 1)]
    between = [Fraction(4 * number, power) for number in range(1, 2 * (heads - power), 2)]
    return first + between


def _places(heads: int, more: int) -> list[int | None]:
    numbers = {slope: number for number, slope in enumerate(slopes(heads))}
    return [numbers.get(slope) for slope in slopes(more)]


FAMILY = Family(
    name="BLOOM",
    model_types=("bloom",),
    architecture="BloomForCausalLM",
    axes={
        "vocab_size": ("vocab",),
        "hidden_size": ("hidden",),
        "intermediate_size": ("ffn",),
        "n_layer": ("layers",),
        "n_head": ("heads",),
        "head_dim": ("head_dim",),
    },
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "intermediate_size": lambda config: 4 * config["hidden_size"],
        "head_dim": lambda config: config["hidden_size"] // config["n_head"],
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "n_embed",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    },
    derived=frozenset({"intermediate_size", "head_dim"}),
    constants={"three": 3},
    places={"heads": _places},
    normed_sums=is_set("apply_residual_connection_post_layernorm"),
    tensors=(
        Tensor("transformer.word_embeddings.weight", "vocab -> hidden"),
        *layer_norm("transformer.word_embeddings_layernorm", NORM),
        *layer_norm(LAYER + "input_layernorm", NORM),
        *linear(LAYER + "self_attention.query_key_value", "heads.three.head_dim <- hidden", always),
        *linear(LAYER + "self_attention.dense", "hidden <- heads.head_dim", always),
        *layer_norm(LAYER + "post_attention_layernorm", NORM),
        *linear(LAYER + "mlp.dense_h_to_4h", "ffn <- hidden", always),
        *linear(LAYER + "mlp.dense_4h_to_h", "hidden <- ffn", always),
        *last_layer_norm("transformer.ln_f", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    grouped=frozenset({"heads"}),
    multiples=(Multiple("hidden_size", "n_head", "because each head has its share of hidden"),),
    duplicates={"lm_head.weight": "transformer.word_embeddings.weight"},
)
