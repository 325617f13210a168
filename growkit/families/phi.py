"""Phi-1 and Phi-2: one LayerNorm for attention and MLP, side by side; the head has a bias.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/phi
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import Norm, Tensor, always
from growkit.families.llama import (
    ATTENTION,
    MLP,
    attention_bias,
    last_layer_norm,
    layer_norm,
    untied,
)
from growkit.families.llama import FAMILY as LLAMA

NORM = Norm("hidden", "layer_norm_eps", centred=True)
HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)


def _qk_norms(config: Config) -> bool:
    return bool(config["qk_layernorm"])


def _attention(tensor: Tensor) -> Tensor:
    when = always if tensor.when is attention_bias else tensor.when
    return replace(tensor, name=tensor.name.replace("o_proj", "dense"), when=when)


def _check(config: Config) -> None:
    """Norms of queries and keys are as wide as a head's share of hidden."""
    share = config["hidden_size"] // config["num_attention_heads"]
    if config["qk_layernorm"] and config["head_dim"] != share:
        raise InputError(
            f"a Phi model with qk_layernorm cannot have head_dim {config['head_dim']} with "
            f"hidden_size {config['hidden_size']} and {config['num_attention_heads']} heads; "
            "grow heads like hidden"
        )


FAMILY = replace(
    LLAMA,
    name="Phi",
    model_types=("phi",),
    architecture="PhiForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        "num_key_value_heads": LLAMA.defaults["num_key_value_heads"],
        "head_dim": LLAMA.defaults["head_dim"],
        "tie_word_embeddings": False,
        "qk_layernorm": False,
        "layer_norm_eps": 1e-5,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm("model.layers.{layer}.input_layernorm", NORM),
        *(_attention(each) for each in LLAMA.tensors if each.name.startswith(ATTENTION)),
        *(
            tensor
            for name in ("q_layernorm", "k_layernorm")
            for tensor in (
                Tensor(ATTENTION + name + ".weight", "head_dim", _qk_norms, norm=HEAD_NORM),
                Tensor(ATTENTION + name + ".bias", "head_dim", _qk_norms),
            )
        ),
        Tensor(MLP + "fc1.weight", "ffn <- hidden"),
        Tensor(MLP + "fc1.bias", "ffn"),
        Tensor(MLP + "fc2.weight", "hidden <- ffn"),
        Tensor(MLP + "fc2.bias", "hidden"),
        *last_layer_norm("model.final_layernorm", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
        Tensor("lm_head.bias", "vocab"),
    ),
    multiples=LLAMA.multiples[:1],
    check=_check,
)
