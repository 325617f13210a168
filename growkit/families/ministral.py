"""Ministral: Mistral's tensors; which layers look through a window is no tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/ministral
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.mistral import FAMILY as MISTRAL

FAMILY = replace(
    MISTRAL,
    name="Ministral",
    model_types=("ministral",),
    architecture="MinistralForCausalLM",
    form=None,  # no DIFF Transformer has windows in some layers
)
