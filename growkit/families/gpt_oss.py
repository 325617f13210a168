"""gpt-oss: Llama's attention with a sink for each head, and experts whose gates are interleaved.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt_oss
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor
from growkit.families.experts import Experts
from growkit.families.layers import every, windows
from growkit.families.llama import ATTENTION, MLP, skeleton
from growkit.families.llama import FAMILY as LLAMA

_attention = tuple(each for each in LLAMA.tensors if each.name.startswith(ATTENTION))

FAMILY = replace(
    LLAMA,
    name="gpt-oss",
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    form=None,  # no DIFF Transformer has sinks
    axes={**LLAMA.axes, "num_local_experts": ("experts",)},
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "layer_types": windows(every(2)),
    },
    constants={"two": 2},
    experts=Experts(width="ffn"),
    tensors=skeleton(
        (*_attention, Tensor(ATTENTION + "sinks", "heads")),
        (
            Tensor(MLP + "router.weight", "experts <- hidden"),
            Tensor(MLP + "router.bias", "experts"),
            Tensor(MLP + "experts.gate_up_proj", "experts: hidden -> ffn.two"),
            Tensor(MLP + "experts.gate_up_proj_bias", "experts, ffn.two"),
            Tensor(MLP + "experts.down_proj", "experts: ffn -> hidden"),
            Tensor(MLP + "experts.down_proj_bias", "experts, hidden"),
        ),
    ),
    multiples=LLAMA.multiples[:1],
)
