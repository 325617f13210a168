"""Gemma 2: Gemma with norms before and behind attention and MLP.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor
from growkit.families.gemma import FAMILY as GEMMA
from growkit.families.llama import HIDDEN_NORM

MORE_NORMS = tuple(
    Tensor(
        f"model.layers.{{layer}}.{which}_feedforward_layernorm.weight", "hidden", norm=HIDDEN_NORM
    )
    for which in ("pre", "post")
)

FAMILY = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    defaults={**GEMMA.defaults, "num_key_value_heads": 4},
    tensors=(*GEMMA.tensors, *(replace(each, offset=1.0) for each in MORE_NORMS)),
)
