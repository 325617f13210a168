"""Falcon: queries, keys and values are one matrix, in one of three orders.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/falcon
"""

from __future__ import annotations

from collections.abc import Mapping

from growkit.algebra.axes import with_keys_and_values
from growkit.base.tensors import Config
from growkit.families.description import (
    Multiple,
    Norm,
    Tensor,
    is_set,
    is_unset,
    last_layer_norm,
    layer_norm,
    linear,
    untied,
)
from growkit.families.family import Family
from growkit.families.sizes import Axes

LAYER = "transformer.h.{layer}."
NORM = Norm("hidden", "layer_norm_epsilon", centred=True)


_grouped = is_set("new_decoder_architecture")
"""Models in which each key-value head follows the queries that it serves."""

_bias = is_set("bias")


def _one_key(config: Config) -> bool:
    return not _grouped(config) and bool(config["multi_query"])


def _many_keys(config: Config) -> bool:
    return not _grouped(config) and not config["multi_query"]


def _two_norms(config: Config) -> bool:
    return bool(config["parallel_attn"]) and config["num_ln_in_parallel_attn"] == 2


def _one_norm(config: Config) -> bool:
    return not _two_norms(config)


def _kv_heads(config: Config) -> Axes:
    if _one_key(config):
        return ()  # the class ignores the key
    return ("kv_heads",) if _grouped(config) else ("heads",)


QKV = LAYER + "self_attention.query_key_value"


def _fixed(config: Config) -> Mapping[str, str]:
    if not config["alibi"]:
        return {}
    why = "cannot grow: its heads have slopes (ALiBi) that depend on how many there are; grow ffn"
    return dict.fromkeys(("heads", "hidden"), why)


FAMILY = Family(
    name="Falcon",
    model_types=("falcon",),
    architecture="FalconForCausalLM",
    axes={
        "vocab_size": ("vocab",),
        "hidden_size": ("hidden",),
        "ffn_hidden_size": ("ffn",),
        "num_hidden_layers": ("layers",),
        "num_attention_heads": ("heads",),
        "num_kv_heads": _kv_heads,
        "head_dim": ("head_dim",),
    },
    defaults={
        "num_kv_heads": lambda config: config["num_attention_heads"],
        "ffn_hidden_size": lambda config: 4 * config["hidden_size"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": lambda c: 2 if c["new_decoder_architecture"] else 1,
        "bias": False,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    derived=frozenset({"head_dim"}),
    constants={"three": 3, "two": 2},
    fixed=_fixed,
    tensors=(
        Tensor("transformer.word_embeddings.weight", "vocab -> hidden"),
        *layer_norm(LAYER + "ln_attn", NORM, _two_norms),
        *layer_norm(LAYER + "ln_mlp", NORM, _two_norms),
        *layer_norm(LAYER + "input_layernorm", NORM, _one_norm),
        *layer_norm(LAYER + "post_attention_layernorm", NORM, is_unset("parallel_attn")),
        *linear(
            QKV,
            "heads.head_dim + kv_heads.head_dim + kv_heads.head_dim <- hidden",
            _bias,
            _grouped,
            with_keys_and_values("heads", "kv_heads", "head_dim"),
        ),
        *linear(QKV, "heads.head_dim + two.head_dim <- hidden", _bias, _one_key),
        *linear(QKV, "heads.three.head_dim <- hidden", _bias, _many_keys),
        *linear(LAYER + "self_attention.dense", "hidden <- heads.head_dim", _bias),
        *linear(LAYER + "mlp.dense_h_to_4h", "ffn <- hidden", _bias),
        *linear(LAYER + "mlp.dense_4h_to_h", "hidden <- ffn", _bias),
        *last_layer_norm("transformer.ln_f", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    grouped=frozenset({"heads", "kv_heads"}),
    served={"heads": ("kv_heads",)},
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because each head has its share of hidden"),
    ),
    duplicates={"lm_head.weight": "transformer.word_embeddings.weight"},
)
