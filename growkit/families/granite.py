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
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    multiples=LLAMA.multiples[:1],
)
