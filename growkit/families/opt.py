"""OPT: learned positions; LayerNorm before the blocks or, in the smallest but one, behind them.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/opt
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor
from growkit.families.family import Family
from growkit.families.llama import tied, untied
from growkit.families.sizes import Axes

When = Callable[[Config], bool]

DECODER = "model.decoder."
LAYER = DECODER + "layers.{layer}."
NORM = Norm("hidden", None, centred=True)


def _bias(config: Config) -> bool:
    return bool(config["enable_bias"])


def _norm_weights(config: Config) -> bool:
    return bool(config["layer_norm_elementwise_affine"])


def _projected(config: Config) -> bool:
    """Embedding and head are narrower than the layers, or wider."""
    return bool(config["word_embed_proj_dim"] != config["hidden_size"])


def _direct(config: Config) -> bool:
    return not _projected(config)


def _last_norm(config: Config) -> bool:
    return bool(config["do_layer_norm_before"]) and not config["_remove_final_layer_norm"]


def _norm_is_last(config: Config) -> bool:
    """Nothing stands between the norm of the last layer and the head."""
    return not config["do_layer_norm_before"]


def _shared_out(config: Config) -> bool:
    """A tied head reads what the norm before it writes."""
    return tied(config) and _direct(config)


def _both(*several: When) -> When:
    return lambda config: all(when(config) for when in several)


def _last_layer(config: Config, layer: int) -> bool:
    last = layer == config["num_hidden_layers"] - 1
    return last and _norm_is_last(config) and _shared_out(config)


def _other_layers(config: Config, layer: int) -> bool:
    return not _last_layer(config, layer)


def _linear(name: str, writes: str, reads: str) -> Iterator[Tensor]:
    yield Tensor(LAYER + name + ".weight", f"{writes} <- {reads}")
    yield Tensor(LAYER + name + ".bias", writes, _bias)


def _norm(name: str, pattern: str, *when: When) -> tuple[Tensor, Tensor]:
    has = _both(_norm_weights, *when)
    return (
        Tensor(name + ".weight", pattern, has, norm=NORM),
        Tensor(name + ".bias", pattern, has),
    )


def _fixed(config: Config) -> Mapping[str, str]:
    alone = not _norm_weights(config) or not (_last_norm(config) or _norm_is_last(config))
    if not (alone and _shared_out(config)):
        return {}
    return {
        "hidden": "cannot grow: its head is tied to the embedding, and before it stands no norm "
        "with a weight that could take back what the head reads more than once; give it a head of "
        "its own with --untie, or write the embedding as lm_head.weight and set "
        "tie_word_embeddings to false"
    }


def _embedding(config: Config) -> Axes:
    return ("embedding",) if _projected(config) else ("hidden",)


HEADS = "heads.head_dim"

TENSORS = (
    Tensor(DECODER + "embed_tokens.weight", "vocab -> embedding", _projected),
    Tensor(DECODER + "embed_tokens.weight", "vocab -> hidden", _direct),
    Tensor(DECODER + "embed_positions.weight", "positions + two -> hidden"),
    Tensor(DECODER + "project_in.weight", "hidden <- embedding", _projected),
    *_linear("self_attn.q_proj", HEADS, "hidden"),
    *_linear("self_attn.k_proj", HEADS, "hidden"),
    *_linear("self_attn.v_proj", HEADS, "hidden"),
    *_linear("self_attn.out_proj", "hidden", HEADS),
    *_norm(LAYER + "self_attn_layer_norm", "hidden"),
    *_linear("fc1", "ffn", "hidden"),
    *_linear("fc2", "hidden", "ffn"),
    *(replace(each, layers=_other_layers) for each in _norm(LAYER + "final_layer_norm", "hidden")),
    # What a tied head reads is shared out one step earlier, in whatever norm that is.
    *(replace(each, layers=_last_layer) for each in _norm(LAYER + "final_layer_norm", "<- hidden")),
    *_norm(DECODER + "final_layer_norm", "<- hidden", _last_norm, _shared_out),
    *_norm(
        DECODER + "final_layer_norm", "hidden", _last_norm, lambda config: not _shared_out(config)
    ),
    Tensor(DECODER + "project_out.weight", "embedding <- hidden", _projected),
    Tensor("lm_head.weight", "vocab <- embedding", _both(untied, _projected)),
    Tensor("lm_head.weight", "vocab <- hidden", _both(untied, _direct)),
)


FAMILY = Family(
    name="OPT",
    model_types=("opt",),
    architecture="OPTForCausalLM",
    axes={
        "vocab_size": ("vocab",),
        "max_position_embeddings": ("positions",),
        "hidden_size": ("hidden",),
        "word_embed_proj_dim": _embedding,
        "ffn_dim": ("ffn",),
        "num_hidden_layers": ("layers",),
        "num_attention_heads": ("heads",),
        "head_dim": ("head_dim",),
    },
    defaults={
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": lambda config: config["hidden_size"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    derived=frozenset({"head_dim"}),
    constants={"two": 2},
    norms=(NORM,),
    normed_sums=_norm_is_last,
    fixed=_fixed,
    tensors=TENSORS,
    grouped=frozenset({"heads"}),
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because each head has its share of hidden"),
    ),
    duplicates={
        "lm_head.weight": "model.decoder.embed_tokens.weight",
    },
)
