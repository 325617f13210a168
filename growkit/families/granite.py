"""Granite: Llama's tensors, with multipliers in the config; and Granite-MoE, with experts.

Files hold the experts of a layer in one tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/granite
https://github.com/huggingface/transformers/tree/main/src/transformers/models/granitemoe
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import NEW, Dense, Experts, Tensor
from growkit.families.llama import (
    BASE_WITH_MLP_BIAS,
    LAYER,
    MLP,
    SOFTMAX,
    attention,
    attention_bias,
    skeleton,
)

GRANITE = replace(
    BASE_WITH_MLP_BIAS,
    name="Granite",
    model_types=("granite",),
    architecture="GraniteForCausalLM",
    form=SOFTMAX,
    defaults={
        **BASE_WITH_MLP_BIAS.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)


def _tensors(router: str, reading: str, writing: str) -> tuple[Tensor, ...]:
    moe = LAYER + "block_sparse_moe."
    gates = (MLP + "gate_proj.weight", MLP + "up_proj.weight")
    experts = (
        Tensor(moe + router, "experts <- hidden", dense=NEW),
        Tensor(moe + reading, "experts: two.ffn <- hidden", dense=gates),
        Tensor(moe + writing, "experts: hidden <- ffn", dense=(MLP + "down_proj.weight",)),
    )
    return skeleton(attention(attention_bias, attention_bias), experts)


GRANITE_MOE = replace(
    GRANITE,
    name="Granite-MoE",
    model_types=("granitemoe",),
    architecture="GraniteMoeForCausalLM",
    form=None,  # no DIFF Transformer has experts
    axes={**GRANITE.axes, "num_local_experts": ("experts",)},
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    constants={"two": 2},
    experts=Experts(width="ffn", dense={"granite": Dense()}),
    tensors=_tensors("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    other_forms=(_tensors("router.weight", "experts.gate_up_proj", "experts.down_proj"),),
)

FAMILIES = {"granite": GRANITE, "granitemoe": GRANITE_MOE}
