"""Cohere: LayerNorm without bias, one for attention and MLP, side by side.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/cohere
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Norm, Tensor
from growkit.families.llama import ATTENTION, mlp_bias
from growkit.families.llama import FAMILY as LLAMA

NORM = Norm("hidden", "layer_norm_eps", centred=True)
HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)


def _qk_norms(config: Config) -> bool:
    return bool(config["use_qk_norm"])


SIDE_BY_SIDE = tuple(
    replace(tensor, norm=NORM) if tensor.norm else tensor
    for tensor in LLAMA.tensors
    if tensor.when is not mlp_bias and "post_attention_layernorm" not in tensor.name
)

FAMILY = replace(
    LLAMA,
    name="Cohere",
    model_types=("cohere",),
    architecture="CohereForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        "num_key_value_heads": LLAMA.defaults["num_key_value_heads"],
        "head_dim": LLAMA.defaults["head_dim"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_qk_norm": False,
        "layer_norm_eps": 1e-5,
    },
    tensors=(
        *SIDE_BY_SIDE,
        Tensor(ATTENTION + "q_norm.weight", "heads, head_dim", _qk_norms, norm=HEAD_NORM),
        Tensor(ATTENTION + "k_norm.weight", "kv_heads, head_dim", _qk_norms, norm=HEAD_NORM),
    ),
    multiples=LLAMA.multiples[:1],
)
