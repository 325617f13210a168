"""Cohere 2: Cohere's tensors; heads are always as wide as their share of hidden.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/cohere2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.cohere import FAMILY as COHERE
from growkit.families.cohere import SIDE_BY_SIDE
from growkit.families.layers import every, windows

FAMILY = replace(
    COHERE,
    name="Cohere 2",
    model_types=("cohere2",),
    architecture="Cohere2ForCausalLM",
    defaults={**COHERE.defaults, "layer_types": windows(every(4, "sliding_window_pattern"))},
    derived=frozenset({"head_dim"}),
    tensors=SIDE_BY_SIDE,
)
