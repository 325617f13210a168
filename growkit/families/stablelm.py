"""StableLM: Llama's tensors with LayerNorm, and attention and MLP side by side in some models.

Some have a norm for every head of queries and keys, each with a weight of its own.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/stablelm
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Norm, Tensor
from growkit.families.llama import (
    ATTENTION,
    MLP_WITHOUT_BIAS,
    attention_bias,
    last_layer_norm,
    layer_norm,
    untied,
)
from growkit.families.llama import FAMILY as LLAMA

NORM = Norm("hidden", "layer_norm_eps", centred=True)
HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)
Q_NORMS = ATTENTION + "q_layernorm.norms.{head}.weight"
K_NORMS = ATTENTION + "k_layernorm.norms.{kv_head}.weight"


def _qkv_bias(config: Config) -> bool:
    return bool(config["use_qkv_bias"])


def _one_after_the_other(config: Config) -> bool:
    return not config["use_parallel_residual"]


def _attention() -> Iterator[Tensor]:
    for tensor in LLAMA.tensors:
        if tensor.when is attention_bias and "o_proj" not in tensor.name:
            yield replace(tensor, when=_qkv_bias)
        elif tensor.name.startswith(ATTENTION) and tensor.when is not attention_bias:
            yield tensor


def _qk_norms(config: Config) -> bool:
    return bool(config["qk_layernorm"])


FAMILY = replace(
    LLAMA,
    name="StableLM",
    model_types=("stablelm",),
    architecture="StableLmForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        "num_key_value_heads": 32,
        "head_dim": LLAMA.defaults["head_dim"],
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "layer_norm_eps": 1e-5,
    },
    derived=frozenset({"head_dim"}),
    tensors=(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm("model.layers.{layer}.input_layernorm", NORM),
        *_attention(),
        Tensor(Q_NORMS, "head_dim", _qk_norms, norm=HEAD_NORM),
        Tensor(K_NORMS, "head_dim", _qk_norms, norm=HEAD_NORM),
        *layer_norm("model.layers.{layer}.post_attention_layernorm", NORM, _one_after_the_other),
        *MLP_WITHOUT_BIAS,
        *last_layer_norm("model.norm", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
)
