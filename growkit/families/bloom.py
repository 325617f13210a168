"""BLOOM: LayerNorm, also of the embedding; heads have slopes (ALiBi) instead of positions.

The slope of a head follows from its number and from how many there are. All slopes of fewer heads
are among those of more, so that a head can stand where the class has its slope; heads between them
are copies that nothing reads yet.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/bloom
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from growkit.checkpoint.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor, always
from growkit.families.family import Family
from growkit.families.llama import last_layer_norm, layer_norm, untied

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


def _sum_of_norms(config: Config) -> bool:
    return bool(config["apply_residual_connection_post_layernorm"])


def _linear(name: str, writes: str, reads: str) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", f"{writes} <- {reads}")
    yield Tensor(name + ".bias", writes)


def _tensors(prefix: str) -> tuple[Tensor, ...]:
    layer = prefix + "h.{layer}."
    return (
        Tensor(prefix + "word_embeddings.weight", "vocab -> hidden"),
        *layer_norm(prefix + "word_embeddings_layernorm", NORM, always),
        *layer_norm(layer + "input_layernorm", NORM),
        *_linear(layer + "self_attention.query_key_value", "heads.three.head_dim", "hidden"),
        *_linear(layer + "self_attention.dense", "hidden", "heads.head_dim"),
        *layer_norm(layer + "post_attention_layernorm", NORM),
        *_linear(layer + "mlp.dense_h_to_4h", "ffn", "hidden"),
        *_linear(layer + "mlp.dense_4h_to_h", "hidden", "ffn"),
        *last_layer_norm(prefix + "ln_f", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    )


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
    normed_sums=_sum_of_norms,
    tensors=_tensors("transformer."),
    other_forms=(_tensors(""),),
    grouped=frozenset({"heads"}),
    multiples=(
        Multiple("hidden_size", "n_head", "because each head has its share of hidden"),
    ),
    duplicates={
        "lm_head.weight": "transformer.word_embeddings.weight",
    },
)
