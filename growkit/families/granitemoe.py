"""Granite-MoE: Granite with experts, which files hold as one tensor for each layer.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/granitemoe
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor
from growkit.families.experts import NEW, Dense, Experts
from growkit.families.granite import FAMILY as GRANITE
from growkit.families.llama import ATTENTION, MLP, skeleton

MOE = "model.layers.{layer}.block_sparse_moe."


def _tensors(router: str, reading: str, writing: str) -> tuple[Tensor, ...]:
    attention = tuple(each for each in GRANITE.tensors if each.name.startswith(ATTENTION))
    experts = (
        Tensor(MOE + router, "experts <- hidden", dense=NEW),
        Tensor(
            MOE + reading,
            "experts: two.ffn <- hidden",
            dense=(MLP + "gate_proj.weight", MLP + "up_proj.weight"),
        ),
        Tensor(MOE + writing, "experts: hidden <- ffn", dense=(MLP + "down_proj.weight",)),
    )
    return skeleton(attention, experts)


FAMILY = replace(
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
