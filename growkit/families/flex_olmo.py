"""FlexOlmo: OLMo 2 with experts in the place of its MLP.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/flex_olmo
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Tensor, every_layer
from growkit.families.experts import Dense, Experts
from growkit.families.llama import MLP
from growkit.families.olmo2 import FAMILY as OLMO2
from growkit.families.qwen3_moe import FAMILY as QWEN3_MOE
from growkit.families.qwen3_moe import experts


def _tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    return (
        *(each for each in OLMO2.tensors if not each.name.startswith(MLP)),
        *experts("ffn", every_layer, stacked=stacked),
    )


FAMILY = replace(
    OLMO2,
    name="FlexOlmo",
    model_types=("flex_olmo",),
    architecture="FlexOlmoForCausalLM",
    axes={**OLMO2.axes, "num_experts": ("experts",)},
    aliases=QWEN3_MOE.aliases,
    defaults={
        **OLMO2.defaults,
        "rms_norm_eps": 1e-6,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
    constants={"two": 2},
    experts=Experts(
        width="ffn",
        dense={"olmo2": Dense(assumed={"rope_theta": 1e4, "max_position_embeddings": 2048})},
        config={"norm_topk_prob": True},
    ),
    tensors=_tensors(stacked=False),
    other_forms=(_tensors(stacked=True),),
)
