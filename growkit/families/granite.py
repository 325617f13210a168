"""Granite: Llama's tensors; the multipliers of the class are numbers of the config.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/granite
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.llama import FAMILY as LLAMA

FAMILY = replace(
    LLAMA,
    name="Granite",
    model_types=("granite",),
    architecture="GraniteForCausalLM",
    form=None,  # no DIFF Transformer has multipliers
    multiples=LLAMA.multiples[:1],
)
