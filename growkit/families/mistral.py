"""Mistral: Llama's tensors without biases; Ministral, Ministral 3, and Mixtral with experts.

Windows, and the factors of Ministral 3 that grow queries with their position, show in no tensor.
Files hold the matrices of Mixtral's experts one by one, or those of a layer in one tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/mistral
https://github.com/huggingface/transformers/tree/main/src/transformers/models/ministral
https://github.com/huggingface/transformers/tree/main/src/transformers/models/ministral3
https://github.com/huggingface/transformers/tree/main/src/transformers/models/mixtral
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from growkit.families.description import NEW, Dense, Experts, Tensor, windows
from growkit.families.llama import BASE, LAYER, MLP, SOFTMAX, attention, gated_mlp, skeleton

MISTRAL = replace(
    BASE,
    name="Mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    form=replace(
        SOFTMAX,
        switches={**SOFTMAX.switches, "attention_bias": False, "mlp_bias": False},
        harmless={"sliding_window": (None,)},
        assumed={"sliding_window": 4096},
    ),
    defaults={**BASE.defaults, "num_key_value_heads": 8},
    tensors=skeleton(attention(), gated_mlp()),
)

MINISTRAL = replace(
    MISTRAL,
    name="Ministral",
    model_types=("ministral",),
    architecture="MinistralForCausalLM",
    form=None,  # no DIFF Transformer has windows
    defaults={
        **{key: value for key, value in MISTRAL.defaults.items() if key != "head_dim"},
        "layer_types": windows(
            lambda config, layer: config.get("sliding_window", 4096) is not None
        ),
    },
)

MINISTRAL3 = replace(
    MISTRAL,
    name="Ministral 3",
    model_types=("ministral3",),
    architecture="Ministral3ForCausalLM",
    form=None,  # no DIFF Transformer scales queries by their position
    defaults={**MISTRAL.defaults, "head_dim": 128, "rms_norm_eps": 1e-5},
)

EXPERT = LAYER + "block_sparse_moe.experts.{expert}."

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

MIXTRAL = replace(
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
    tensors=skeleton(attention(), ONE_BY_ONE),
    other_forms=(skeleton(attention(), STACKED),),
)

FAMILIES = {
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "mixtral": MIXTRAL,
}
