"""Gemma: Llama's tensors; embeddings are multiplied by √hidden, and norms add 1 to their weights.

√hidden must keep its bits, so hidden grows by powers of four.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.families.description import Tensor
from growkit.families.llama import FAMILY as LLAMA
from growkit.families.llama import mlp_bias, tied


def _root(sizes: Mapping[str, int]) -> float:
    return float(sizes["hidden"] ** 0.5)


def _as_in_gemma(tensor: Tensor) -> Tensor:
    if tensor.name == "model.embed_tokens.weight":
        return replace(tensor, scale=_root)
    if tensor.norm and tensor.when is tied:
        # The head reads the embedding as it is stored, without the factor that makes up for it.
        return replace(tensor, offset=1.0, scale=lambda sizes: 1 / _root(sizes))
    return replace(tensor, offset=1.0) if tensor.norm else tensor


FAMILY = replace(
    LLAMA,
    name="Gemma",
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    form=None,  # no DIFF Transformer multiplies its embeddings
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    tensors=tuple(_as_in_gemma(each) for each in LLAMA.tensors if each.when is not mlp_bias),
    multiples=LLAMA.multiples[:1],
)
