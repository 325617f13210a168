"""DeepSeek-V3: DeepSeek-V2 with a correction beside every router.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/deepseek_v3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.checkpoint.tensors import Config
from growkit.families.deepseek_v2 import FAMILY as DEEPSEEK_V2
from growkit.families.deepseek_v2 import mla_with_experts
from growkit.families.description import Tensor
from growkit.families.llama import MLP


def _never(config: Config) -> bool:
    return False


CORRECTION = Tensor(MLP + "gate.e_score_correction_bias", "experts")

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
    },
    tensors=mla_with_experts(_never, CORRECTION, stacked=False),
    other_forms=(mla_with_experts(_never, CORRECTION, stacked=True),),
)
