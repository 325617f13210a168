"""Mixtral: Mistral with experts, of which a router picks some for every token.

Files hold the matrices of every expert one by one, or those of a layer's experts in one tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/mixtral
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from growkit.families.description import Tensor
from growkit.families.experts import NEW, Dense, Experts
from growkit.families.llama import ATTENTION, MLP, skeleton
from growkit.families.mistral import FAMILY as MISTRAL

LAYER = "model.layers.{layer}."
EXPERT = LAYER + "block_sparse_moe.experts.{expert}."

_attention = tuple(tensor for tensor in MISTRAL.tensors if tensor.name.startswith(ATTENTION))

_router = partial(Tensor, pattern="experts <- hidden", component="router", dense=NEW)
_expert = partial(Tensor, component="experts")

ONE_BY_ONE = (
    _router(LAYER + "block_sparse_moe.gate.weight"),
    _expert(EXPERT + "w1.weight", "ffn <- hidden", dense=(MLP + "gate_proj.weight",)),
    _expert(EXPERT + "w2.weight", "hidden <- ffn", dense=(MLP + "down_proj.weight",)),
    _expert(EXPERT + "w3.weight", "ffn <- hidden", dense=(MLP + "up_proj.weight",)),
)
STACKED = (
    _router(LAYER + "mlp.gate.weight"),
    _expert(LAYER + "mlp.experts.gate_up_proj", "experts: two.ffn <- hidden"),
    _expert(LAYER + "mlp.experts.down_proj", "experts: hidden <- ffn"),
)

FAMILY = replace(
    MISTRAL,
    name="Mixtral",
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    form=None,  # no DIFF Transformer has experts
    axes={**MISTRAL.axes, "num_local_experts": ("experts",)},
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    constants={"two": 2},
    experts=Experts(
        width="ffn",
        dense={
            "llama": Dense(
                assumed={"rope_theta": 1e4, "max_position_embeddings": 2048},
                ignored={"sliding_window": None},
            ),
            "mistral": Dense(assumed={"rope_theta": 1e4, "sliding_window": 4096}),
        },
    ),
    tensors=skeleton(_attention, ONE_BY_ONE),
    other_forms=(skeleton(_attention, STACKED),),
)
