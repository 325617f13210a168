"""Qwen2 and Qwen3: Llama's tensors with biases, or with norms of heads; dense and with experts.

Qwen2 (and 2.5) has biases of queries, keys and values; Qwen3 has a norm of every query and key
head. The MoE models have experts in some layers and an MLP in the others; those of Qwen2 also have
a shared expert for every token. Files hold the matrices of every expert one by one, or those of a
layer's experts in one tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen2
https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen2_moe
https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen3
https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen3_moe
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import (
    NEW,
    Dense,
    Experts,
    InLayer,
    Norm,
    Tensor,
    always,
    is_set,
    only,
    windows,
)
from growkit.families.llama import (
    BASE,
    MLP,
    SOFTMAX,
    attention,
    attention_bias,
    gated_mlp,
    qk_norms,
    skeleton,
)

HEAD_NORM = Norm("head_dim", "rms_norm_eps")


def _has_window(config: Config, layer: int) -> bool:
    used = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    return bool(used and layer >= config.get("max_window_layers", 28))


QWEN2 = replace(
    BASE,
    name="Qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    form=replace(
        SOFTMAX,
        switches={
            **SOFTMAX.switches,
            "attention_bias": True,
            "attention_output_bias": False,
            "mlp_bias": False,
        },
    ),
    defaults={**BASE.defaults, "num_key_value_heads": 32, "layer_types": windows(_has_window)},
    tensors=skeleton(attention(always), gated_mlp()),
)

QWEN3 = replace(
    BASE,
    name="Qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    form=replace(SOFTMAX, switches={**SOFTMAX.switches, "qk_norm": True, "mlp_bias": False}),
    defaults={
        **BASE.defaults,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "layer_types": windows(_has_window),
    },
    tensors=(*BASE.tensors, *qk_norms(HEAD_NORM)),
)

EVERYWHERE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
"""Experts in every layer, and chosen weights that sum to one."""

ONE_WINDOW = {"use_sliding_window": (False, None)}
"""The classes with experts have their windows in other layers than the dense ones."""


def _sparse(config: Config, layer: int) -> bool:
    """Layers with experts."""
    step = config["decoder_sparse_step"]
    return layer not in config["mlp_only_layers"] and (layer + 1) % step == 0


def _dense(config: Config, layer: int) -> bool:
    return not _sparse(config, layer)


def _check_step(config: Config) -> None:
    if config["decoder_sparse_step"] < 1:
        raise InputError(
            f"config.json has decoder_sparse_step {config['decoder_sparse_step']}; a number from 1 "
            "upwards was expected"
        )


def _arranged(config: Config, layers: Sequence[int]) -> Config:
    wanted = [place for place, layer in enumerate(layers) if _dense(config, layer)]
    if wanted == [place for place in range(len(layers)) if _dense(config, place)]:
        return {}
    return {"decoder_sparse_step": 1, "mlp_only_layers": wanted}


def experts(width: str, layers: InLayer, *, stacked: bool) -> tuple[Tensor, ...]:
    """A router and its experts; ``width`` is the axis of one expert."""
    each = MLP + "experts.{expert}."
    found: tuple[Tensor, ...] = (
        Tensor(each + "gate_proj.weight", f"{width} <- hidden", dense=(MLP + "gate_proj.weight",)),
        Tensor(each + "up_proj.weight", f"{width} <- hidden", dense=(MLP + "up_proj.weight",)),
        Tensor(each + "down_proj.weight", f"hidden <- {width}", dense=(MLP + "down_proj.weight",)),
    )
    if stacked:
        found = (
            Tensor(MLP + "experts.gate_up_proj", f"experts: two.{width} <- hidden"),
            Tensor(MLP + "experts.down_proj", f"experts: hidden <- {width}"),
        )
    router = Tensor(MLP + "gate.weight", "experts <- hidden", dense=NEW)
    return only(layers, (router, *found))


def _qwen3_tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    return (
        *skeleton(attention(attention_bias, attention_bias), ()),
        *qk_norms(HEAD_NORM),
        *only(_dense, gated_mlp()),
        *experts("expert_ffn", _sparse, stacked=stacked),
    )


QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    form=None,  # no DIFF Transformer has experts
    axes={
        **QWEN3.axes,
        "moe_intermediate_size": ("expert_ffn",),
        "num_experts": ("experts",),
    },
    aliases={"num_experts": "num_local_experts"},
    kinds={"expert_ffn": "ffn"},
    arranged=_arranged,
    check=_check_step,
    defaults={
        **QWEN3.defaults,
        "num_key_value_heads": 4,
        "head_dim": BASE.defaults["head_dim"],
        "layer_types": None,  # all layers have a window, or none
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_tok": 8,
    },
    constants={"two": 2},
    experts=Experts(width="expert_ffn", dense={"qwen3": Dense(only=ONE_WINDOW)}, config=EVERYWHERE),
    tensors=_qwen3_tensors(stacked=False),
    other_forms=(_qwen3_tensors(stacked=True),),
)


def _has_window_in_moe(config: Config, layer: int) -> bool:
    used = config.get("use_sliding_window") and layer < config.get("max_window_layers", 28)
    return bool(used and (layer + 1) % 2)


def _shared(name: str, pattern: str) -> Tensor:
    return Tensor(f"{MLP}shared_expert.{name}.weight", pattern, dense=(f"{MLP}{name}.weight",))


def _qwen2_tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    shared = (
        _shared("gate_proj", "shared_ffn <- hidden"),
        _shared("up_proj", "shared_ffn <- hidden"),
        _shared("down_proj", "hidden <- shared_ffn"),
        Tensor(MLP + "shared_expert_gate.weight", "one <- hidden", dense=NEW),
    )
    return (
        *skeleton(attention(is_set("qkv_bias")), only(_dense, gated_mlp())),
        *experts("expert_ffn", _sparse, stacked=stacked),
        *only(_sparse, shared),
    )


QWEN2_MOE = replace(
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
    arranged=_arranged,
    check=_check_step,
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
        "layer_types": windows(_has_window_in_moe),
    },
    constants={"one": 1, "two": 2},
    # A gate of zeros lets through half of the shared expert; the chosen experts compute the rest.
    may_be_zero=frozenset({"shared_expert_intermediate_size"}),
    experts=Experts(
        width="expert_ffn",
        dense={"qwen2": Dense(only=ONE_WINDOW)},
        config=EVERYWHERE,
        part=0.5,
        sizes=lambda width, pieces: {"shared_ffn": width},
    ),
    tensors=_qwen2_tensors(stacked=False),
    other_forms=(_qwen2_tensors(stacked=True),),
)

FAMILIES = {"qwen2": QWEN2, "qwen2_moe": QWEN2_MOE, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
