"""Mistral: Llama's tensors without biases; the sliding window is no tensor and stays in the config.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/mistral
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.llama import FAMILY as LLAMA
from growkit.families.llama import SOFTMAX, attention_bias, mlp_bias

FAMILY = replace(
    LLAMA,
    name="Mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    form=replace(
        SOFTMAX,
        switches={**SOFTMAX.switches, "attention_bias": False, "mlp_bias": False},
        harmless={"sliding_window": (None,)},
        assumed={"sliding_window": 4096},
    ),
    defaults={**LLAMA.defaults, "num_key_value_heads": 8},
    tensors=tuple(t for t in LLAMA.tensors if t.when not in (attention_bias, mlp_bias)),
    multiples=LLAMA.multiples[:1],
)
