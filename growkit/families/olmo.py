"""OLMo: Llama's tensors, with norms that have no weights, or stand behind attention and MLP.

OLMo's norms have no weights. OLMo 2 has norms behind attention and MLP, and over all queries and
all keys; OLMo 3 adds windows in all layers except every fourth. OLMoE and FlexOlmo have experts.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo
https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo2
https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo3
https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmoe
https://github.com/huggingface/transformers/tree/main/src/transformers/models/flex_olmo
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import (
    TIED_TO_NO_NORM,
    Dense,
    Experts,
    Norm,
    Tensor,
    every_layer,
    except_every,
    tied,
    windows,
)
from growkit.families.llama import (
    ATTENTION,
    BASE,
    HIDDEN_NORM,
    LAYER,
    LLAMA,
    MLP,
)
from growkit.families.qwen import QWEN3_MOE, experts

OLMO = replace(
    BASE,
    name="OLMo",
    model_types=("olmo",),
    architecture="OlmoForCausalLM",
    tensors=tuple(each for each in BASE.tensors if not each.norm),
    norms=(Norm("hidden", None, centred=True),),
    fixed=lambda config: {"hidden": TIED_TO_NO_NORM} if tied(config) else {},
)

QK_NORMS = (
    Tensor(ATTENTION + "q_norm.weight", "heads.head_dim", norm=Norm("heads", "rms_norm_eps")),
    Tensor(ATTENTION + "k_norm.weight", "kv_heads.head_dim", norm=Norm("kv_heads", "rms_norm_eps")),
)
"""Norms over all queries and over all keys."""

BEHIND = replace(HIDDEN_NORM, behind=True)

OLMO2 = replace(
    BASE,
    name="OLMo 2",
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    defaults={**BASE.defaults, "rms_norm_eps": 1e-5},
    tensors=(
        *(
            replace(each, norm=BEHIND) if "post_attention_layernorm" in each.name else each
            for each in BASE.tensors
            if "input_layernorm" not in each.name
        ),
        *QK_NORMS,
        Tensor(LAYER + "post_feedforward_layernorm.weight", "hidden", norm=BEHIND),
    ),
)

OLMO3 = replace(
    OLMO2,
    name="OLMo 3",
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "layer_types": windows(except_every(4))},
)


def _with_experts(tensors: tuple[Tensor, ...], *, stacked: bool) -> tuple[Tensor, ...]:
    others = (each for each in tensors if not each.name.startswith(MLP))
    return (*others, *experts("ffn", every_layer, stacked=stacked))


OLMOE_TENSORS = (*BASE.tensors, *QK_NORMS)

OLMOE = replace(
    BASE,
    name="OLMoE",
    model_types=("olmoe",),
    architecture="OlmoeForCausalLM",
    axes={**BASE.axes, "num_experts": ("experts",)},
    aliases=QWEN3_MOE.aliases,
    defaults={**BASE.defaults, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    derived=frozenset({"head_dim"}),
    constants={"two": 2},
    multiples=LLAMA.multiples,
    experts=Experts(width="ffn"),  # no dense class has its norms where it has them
    tensors=_with_experts(OLMOE_TENSORS, stacked=False),
    other_forms=(_with_experts(OLMOE_TENSORS, stacked=True),),
)

FLEX_OLMO = replace(
    OLMO2,
    name="FlexOlmo",
    model_types=("flex_olmo",),
    architecture="FlexOlmoForCausalLM",
    axes=OLMOE.axes,
    aliases=QWEN3_MOE.aliases,
    defaults={**BASE.defaults, "num_experts": 7, "num_experts_per_tok": 5},
    constants={"two": 2},
    experts=Experts(
        width="ffn",
        dense={"olmo2": Dense(assumed={"rope_theta": 1e4, "max_position_embeddings": 2048})},
        config={"norm_topk_prob": True},
    ),
    tensors=_with_experts(OLMO2.tensors, stacked=False),
    other_forms=(_with_experts(OLMO2.tensors, stacked=True),),
)

FAMILIES = {
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
}
