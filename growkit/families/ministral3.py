"""Ministral 3: Mistral's tensors; queries grow with the position, by numbers of the config.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/ministral3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.mistral import FAMILY as MISTRAL

FAMILY = replace(
    MISTRAL,
    name="Ministral 3",
    model_types=("ministral3",),
    architecture="Ministral3ForCausalLM",
    form=None,  # no DIFF Transformer scales queries by their position
    defaults={**MISTRAL.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
)
