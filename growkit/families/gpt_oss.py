"""gpt-oss: Llama's attention with a sink for each head, and experts whose gates are interleaved.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt_oss
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Experts, Tensor, always, except_every, linear, windows
from growkit.families.llama import ATTENTION, BASE, MLP, attention, attention_bias, skeleton

FAMILY = replace(
    BASE,
    name="gpt-oss",
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    axes={**BASE.axes, "num_local_experts": ("experts",)},
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **BASE.defaults,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "layer_types": windows(except_every(2)),
    },
    constants={"two": 2},
    experts=Experts(width="ffn"),
    tensors=skeleton(
        (
            *attention(attention_bias, attention_bias),
            Tensor(ATTENTION + "sinks", "heads"),
        ),
        (
            *linear(MLP + "router", "experts <- hidden", always),
            Tensor(MLP + "experts.gate_up_proj", "experts: hidden -> ffn.two"),
            Tensor(MLP + "experts.gate_up_proj_bias", "experts, ffn.two"),
            Tensor(MLP + "experts.down_proj", "experts: ffn -> hidden"),
            Tensor(MLP + "experts.down_proj_bias", "experts, hidden"),
        ),
    ),
)
