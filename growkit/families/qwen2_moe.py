"""Qwen2-MoE: Qwen2 with experts in some layers, beside one that every token goes through.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen2_moe
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Tensor, always
from growkit.families.experts import NEW, Dense, Experts
from growkit.families.layers import windows
from growkit.families.llama import ATTENTION, MLP
from growkit.families.qwen2 import FAMILY as QWEN2
from growkit.families.qwen3_moe import (
    EVERYWHERE,
    ONE_WINDOW,
    arranged,
    check_step,
    dense,
    experts,
    only,
    sparse,
)
from growkit.families.qwen3_moe import FAMILY as QWEN3_MOE

SHARED = MLP + "shared_expert."


def _has_window(config: Config, layer: int) -> bool:
    used = config.get("use_sliding_window") and layer < config.get("max_window_layers", 28)
    return bool(used and (layer + 1) % 2)


def _qkv_bias(config: Config) -> bool:
    return bool(config["qkv_bias"])


def _of_qwen2(tensor: Tensor) -> Tensor:
    if tensor.name.startswith(MLP):
        return replace(tensor, layers=dense)
    bias = tensor.name.startswith(ATTENTION) and tensor.name.endswith("bias")
    return replace(tensor, when=_qkv_bias if bias and tensor.when is always else tensor.when)


def _shared(name: str, pattern: str) -> Tensor:
    return Tensor(SHARED + name, pattern, dense=(MLP + name,))


def _tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    shared = (
        _shared("gate_proj.weight", "shared_ffn <- hidden"),
        _shared("up_proj.weight", "shared_ffn <- hidden"),
        _shared("down_proj.weight", "hidden <- shared_ffn"),
        Tensor(MLP + "shared_expert_gate.weight", "one <- hidden", dense=NEW),
    )
    return (
        *map(_of_qwen2, QWEN2.tensors),
        *experts("expert_ffn", sparse, stacked=stacked),
        *only(sparse, shared),
    )


FAMILY = replace(
    QWEN2,
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    form=None,  # no DIFF Transformer has experts
    axes={
        **QWEN2.axes,
        "moe_intermediate_size": ("expert_ffn",),
        "shared_expert_intermediate_size": ("shared_ffn",),
        "num_experts": ("experts",),
    },
    aliases=QWEN3_MOE.aliases,
    kinds={"expert_ffn": "ffn", "shared_ffn": "ffn"},
    arranged=arranged,
    check=check_step,
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "layer_types": windows(_has_window),
    },
    constants={"one": 1, "two": 2},
    # A gate of zeros lets through half of the shared expert; the chosen ones compute the other.
    may_be_zero=frozenset({"shared_expert_intermediate_size"}),
    experts=Experts(
        width="expert_ffn",
        dense={"qwen2": Dense(only=ONE_WINDOW)},
        config=EVERYWHERE,
        part=0.5,
        sizes=lambda width, pieces: {"shared_ffn": width},
    ),
    tensors=_tensors(stacked=False),
    other_forms=(_tensors(stacked=True),),
)
