"""Falcon: queries, keys and values are one matrix, in one of three orders.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/falcon
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from growkit.algebra.axes import with_keys_and_values
from growkit.base.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor, always
from growkit.families.family import Family
from growkit.families.llama import tied, untied
from growkit.families.sizes import Axes

When = Callable[[Config], bool]

LAYER = "transformer.h.{layer}."
NORM = Norm("hidden", "layer_norm_epsilon", centred=True)


def _grouped(config: Config) -> bool:
    """Each key-value head stands behind the queries that it serves."""
    return bool(config["new_decoder_architecture"])


def _one_key(config: Config) -> bool:
    return not _grouped(config) and bool(config["multi_query"])


def _many_keys(config: Config) -> bool:
    return not _grouped(config) and not config["multi_query"]


def _bias(config: Config) -> bool:
    return bool(config["bias"])


def _one_after_the_other(config: Config) -> bool:
    return not config["parallel_attn"]


def _two_norms(config: Config) -> bool:
    return bool(config["parallel_attn"]) and config["num_ln_in_parallel_attn"] == 2


def _one_norm(config: Config) -> bool:
    return not _two_norms(config)


def _both(*several: When) -> When:
    return lambda config: all(when(config) for when in several)


def _linear(name: str, writes: str, reads: str, when: When = always) -> Iterator[Tensor]:
    yield Tensor(LAYER + name + ".weight", f"{writes} <- {reads}", when)
    yield Tensor(LAYER + name + ".bias", writes, _both(when, _bias))


def _norm(name: str, pattern: str, when: When = always) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", pattern, when, norm=NORM)
    yield Tensor(name + ".bias", pattern, when)


def _kv_heads(config: Config) -> Axes:
    if _one_key(config):
        return ()  # whatever the config says
    return ("kv_heads",) if _grouped(config) else ("heads",)


QKV = "self_attention.query_key_value"
IN_GROUPS = with_keys_and_values("heads", "kv_heads", "head_dim")


def _in_groups() -> Iterator[Tensor]:
    written = "heads.head_dim + kv_heads.head_dim + kv_heads.head_dim"
    yield Tensor(LAYER + QKV + ".weight", f"{written} <- hidden", _grouped, order=IN_GROUPS)
    yield Tensor(LAYER + QKV + ".bias", written, _both(_grouped, _bias), order=IN_GROUPS)


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
        *_norm(LAYER + "ln_attn", "hidden", _two_norms),
        *_norm(LAYER + "ln_mlp", "hidden", _two_norms),
        *_norm(LAYER + "input_layernorm", "hidden", _one_norm),
        *_norm(LAYER + "post_attention_layernorm", "hidden", _one_after_the_other),
        *_in_groups(),
        *_linear(QKV, "heads.head_dim + two.head_dim", "hidden", _one_key),
        *_linear(QKV, "heads.three.head_dim", "hidden", _many_keys),
        *_linear("self_attention.dense", "hidden", "heads.head_dim"),
        *_linear("mlp.dense_h_to_4h", "ffn", "hidden"),
        *_linear("mlp.dense_4h_to_h", "hidden", "ffn"),
        *_norm("transformer.ln_f", "<- hidden", tied),
        *_norm("transformer.ln_f", "hidden", untied),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    grouped=frozenset({"heads", "kv_heads"}),
    served={"heads": ("kv_heads",)},
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because each head has its share of hidden"),
    ),
    duplicates={"lm_head.weight": "transformer.word_embeddings.weight"},
)
