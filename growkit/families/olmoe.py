"""OLMoE: Llama's tensors with experts, and norms over all queries and all keys.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmoe
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor, every_layer
from growkit.families.experts import Experts
from growkit.families.llama import FAMILY as LLAMA
from growkit.families.llama import MLP
from growkit.families.olmo2 import QK_NORMS
from growkit.families.qwen3_moe import FAMILY as QWEN3_MOE
from growkit.families.qwen3_moe import experts


def _tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    return (
        *(each for each in LLAMA.tensors if not each.name.startswith(MLP)),
        *QK_NORMS,
        *experts("ffn", every_layer, stacked=stacked),
    )


FAMILY = replace(
    LLAMA,
    name="OLMoE",
    model_types=("olmoe",),
    architecture="OlmoeForCausalLM",
    form=None,  # no DIFF Transformer has experts
    axes={**LLAMA.axes, "num_experts": ("experts",)},
    aliases=QWEN3_MOE.aliases,
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    derived=frozenset({"head_dim"}),
    constants={"two": 2},
    experts=Experts(width="ffn"),  # no dense class has its norms where it has them
    tensors=_tensors(stacked=False),
    other_forms=(_tensors(stacked=True),),
)
