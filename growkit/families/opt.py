"""OPT: learned positions; LayerNorm before the blocks or, in the smallest but one, behind them.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/opt
"""

from __future__ import annotations

from collections.abc import Mapping

from growkit.base.tensors import Config
from growkit.families.description import (
    TIED_TO_NO_NORM,
    Multiple,
    Norm,
    Tensor,
    both,
    is_set,
    is_unset,
    layer_norm,
    linear,
    only,
    tied,
    untied,
)
from growkit.families.family import Family

DECODER = "model.decoder."
LAYER = DECODER + "layers.{layer}."
NORM = Norm("hidden", None, centred=True)


_bias = is_set("enable_bias")
_norm_weights = is_set("layer_norm_elementwise_affine")

_norm_is_last = is_unset("do_layer_norm_before")
"""Models in which the norm of the last layer is right before the head."""


def _projected(config: Config) -> bool:
    """Embedding and head are narrower than the layers, or wider."""
    return bool(config["word_embed_proj_dim"] != config["hidden_size"])


def _direct(config: Config) -> bool:
    return not _projected(config)


def _last_norm(config: Config) -> bool:
    """Models with a norm before the head, outside of the layers, that has a weight."""
    before = config["do_layer_norm_before"] and not config["_remove_final_layer_norm"]
    return bool(before) and _norm_weights(config)


def _shared_out(config: Config) -> bool:
    """Models whose tied head reads the output of the norm before it."""
    return tied(config) and _direct(config)


def _not_shared_out(config: Config) -> bool:
    return not _shared_out(config)


def _last_layer(config: Config, layer: int) -> bool:
    last = layer == config["num_hidden_layers"] - 1
    return last and _norm_is_last(config) and _shared_out(config)


def _other_layers(config: Config, layer: int) -> bool:
    return not _last_layer(config, layer)


def _fixed(config: Config) -> Mapping[str, str]:
    alone = not _norm_weights(config) or not (_last_norm(config) or _norm_is_last(config))
    if not (alone and _shared_out(config)):
        return {}
    return {"hidden": TIED_TO_NO_NORM}


FAMILY = Family(
    name="OPT",
    model_types=("opt",),
    architecture="OPTForCausalLM",
    axes={
        "vocab_size": ("vocab",),
        "max_position_embeddings": ("positions",),
        "hidden_size": ("hidden",),
        "word_embed_proj_dim": lambda config: ("embedding",) if _projected(config) else ("hidden",),
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
    tensors=(
        Tensor(DECODER + "embed_tokens.weight", "vocab -> embedding", _projected),
        Tensor(DECODER + "embed_tokens.weight", "vocab -> hidden", _direct),
        Tensor(DECODER + "embed_positions.weight", "positions + two -> hidden"),
        *linear(DECODER + "project_in", "hidden <- embedding", when=_projected),
        *linear(LAYER + "self_attn.q_proj", "heads.head_dim <- hidden", _bias),
        *linear(LAYER + "self_attn.k_proj", "heads.head_dim <- hidden", _bias),
        *linear(LAYER + "self_attn.v_proj", "heads.head_dim <- hidden", _bias),
        *linear(LAYER + "self_attn.out_proj", "hidden <- heads.head_dim", _bias),
        *layer_norm(LAYER + "self_attn_layer_norm", NORM, _norm_weights),
        *linear(LAYER + "fc1", "ffn <- hidden", _bias),
        *linear(LAYER + "fc2", "hidden <- ffn", _bias),
        *only(_other_layers, layer_norm(LAYER + "final_layer_norm", NORM, _norm_weights)),
        # The last norm splits what a tied head reads, be it that of the last layer or its own.
        *only(
            _last_layer, layer_norm(LAYER + "final_layer_norm", NORM, _norm_weights, "<- hidden")
        ),
        *layer_norm(DECODER + "final_layer_norm", NORM, both(_last_norm, _shared_out), "<- hidden"),
        *layer_norm(DECODER + "final_layer_norm", NORM, both(_last_norm, _not_shared_out)),
        *linear(DECODER + "project_out", "embedding <- hidden", when=_projected),
        Tensor("lm_head.weight", "vocab <- embedding", both(untied, _projected)),
        Tensor("lm_head.weight", "vocab <- hidden", both(untied, _direct)),
    ),
    grouped=frozenset({"heads"}),
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because each head has its share of hidden"),
    ),
    duplicates={
        "lm_head.weight": "model.decoder.embed_tokens.weight",
    },
)
