"""Gemma 2: Gemma with norms before and behind attention and MLP.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Multiple, Tensor
from growkit.families.gemma import FAMILY as GEMMA
from growkit.families.layers import every, windows
from growkit.families.llama import HIDDEN_NORM

LAYER = "model.layers.{layer}."
BEHIND = replace(HIDDEN_NORM, behind=True)

MORE_NORMS = (
    Tensor(LAYER + "pre_feedforward_layernorm.weight", "hidden", norm=HIDDEN_NORM),
    Tensor(LAYER + "post_feedforward_layernorm.weight", "hidden", norm=BEHIND),
)


def _as_in_gemma2(tensor: Tensor) -> Tensor:
    return replace(tensor, norm=BEHIND) if "post_attention" in tensor.name else tensor


FAMILY = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    defaults={**GEMMA.defaults, "num_key_value_heads": 4, "layer_types": windows(every(2))},
    multiples=(
        *GEMMA.multiples,
        Multiple("hidden_size", "num_attention_heads", "because its config accepts nothing else"),
    ),
    tensors=(
        *map(_as_in_gemma2, GEMMA.tensors),
        *(replace(each, offset=1.0) for each in MORE_NORMS),
    ),
)
