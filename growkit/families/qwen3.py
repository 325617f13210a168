"""Qwen3: Llama's tensors with a norm inside of every query and key head.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Norm, Tensor
from growkit.families.layers import windows
from growkit.families.llama import ATTENTION, SOFTMAX, mlp_bias
from growkit.families.llama import FAMILY as LLAMA
from growkit.families.qwen2 import has_window

HEAD_NORM = Norm("head_dim", "rms_norm_eps")

FAMILY = replace(
    LLAMA,
    name="Qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    form=replace(SOFTMAX, switches={**SOFTMAX.switches, "qk_norm": True, "mlp_bias": False}),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "layer_types": windows(has_window),
    },
    tensors=(
        *(tensor for tensor in LLAMA.tensors if tensor.when is not mlp_bias),
        Tensor(ATTENTION + "q_norm.weight", "head_dim", norm=HEAD_NORM),
        Tensor(ATTENTION + "k_norm.weight", "head_dim", norm=HEAD_NORM),
    ),
    multiples=LLAMA.multiples[:1],
)
