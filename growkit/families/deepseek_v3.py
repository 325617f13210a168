"""DeepSeek-V3: DeepSeek-V2 with a correction beside every router.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/deepseek_v3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.deepseek_v2 import EXPERTS, mla_with_experts
from growkit.families.deepseek_v2 import FAMILY as DEEPSEEK_V2
from growkit.families.description import Tensor
from growkit.families.experts import NEW, Dense
from growkit.families.llama import MLP


def _never(config: Config) -> bool:
    return False


def _without_experts(config: Config) -> bool:
    return bool(config["first_k_dense_replace"] >= config["num_hidden_layers"])


def _by_themselves(config: Config) -> bool:
    """The weights of the chosen experts are not made to sum to one."""
    return not config["norm_topk_prob"]


CORRECTION = Tensor(MLP + "gate.e_score_correction_bias", "experts", dense=NEW)

FAMILY = replace(
    DEEPSEEK_V2,
    name="DeepSeek-V3",
    model_types=("deepseek_v3",),
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEEPSEEK_V2.defaults,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    may_be_zero=frozenset({"n_shared_experts"}),
    experts=replace(
        EXPERTS,
        alone=_by_themselves,
        dense={"deepseek_v3": Dense(when=_without_experts)},
        config={
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        part=0.5,
        beside=0.5,
        sizes=lambda width, pieces: {"shared": pieces},
    ),
    tensors=mla_with_experts(_never, CORRECTION, stacked=False),
    other_forms=(mla_with_experts(_never, CORRECTION, stacked=True),),
)
