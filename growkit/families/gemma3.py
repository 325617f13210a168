"""Gemma 3, the text model: Gemma 2 with norms inside of every query and key head.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor
from growkit.families.gemma2 import FAMILY as GEMMA2
from growkit.families.layers import every, windows
from growkit.families.llama import ATTENTION
from growkit.families.qwen3 import HEAD_NORM

FAMILY = replace(
    GEMMA2,
    name="Gemma 3",
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    defaults={**GEMMA2.defaults, "layer_types": windows(every(6, "sliding_window_pattern"))},
    tensors=(
        *GEMMA2.tensors,
        Tensor(ATTENTION + "q_norm.weight", "head_dim", norm=HEAD_NORM, offset=1.0),
        Tensor(ATTENTION + "k_norm.weight", "head_dim", norm=HEAD_NORM, offset=1.0),
    ),
)
