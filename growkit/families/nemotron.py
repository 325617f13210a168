"""Nemotron: Llama's attention, LayerNorm that adds 1 to its weight, and an MLP without a gate.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/nemotron
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Norm, Tensor
from growkit.families.llama import (
    ATTENTION,
    MLP,
    last_layer_norm,
    layer_norm,
    mlp_bias,
    untied,
)
from growkit.families.llama import FAMILY as LLAMA

NORM = Norm("hidden", "norm_eps", centred=True)


def _as_in_nemotron(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The class adds 1 to the weight of a norm, and nothing to its bias."""
    return tuple(replace(each, offset=1.0) if each.norm else each for each in tensors)


FAMILY = replace(
    LLAMA,
    name="Nemotron",
    model_types=("nemotron",),
    architecture="NemotronForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        # The class loads no model whose config leaves out num_key_value_heads.
        "head_dim": LLAMA.defaults["head_dim"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_eps": 1e-5,
    },
    tensors=_as_in_nemotron(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm("model.layers.{layer}.input_layernorm", NORM),
        *(each for each in LLAMA.tensors if each.name.startswith(ATTENTION)),
        *layer_norm("model.layers.{layer}.post_attention_layernorm", NORM),
        Tensor(MLP + "up_proj.weight", "ffn <- hidden"),
        Tensor(MLP + "up_proj.bias", "ffn", mlp_bias),
        Tensor(MLP + "down_proj.weight", "hidden <- ffn"),
        Tensor(MLP + "down_proj.bias", "hidden", mlp_bias),
        *last_layer_norm("model.norm", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    multiples=LLAMA.multiples[:1],
)
