"""Qwen3-MoE: Qwen3 with experts in some layers, narrower than the MLP of the others.

Files hold the matrices of every expert one by one, or those of a layer's experts in one tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen3_moe
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import Tensor
from growkit.families.experts import NEW, Dense, Experts
from growkit.families.llama import MLP
from growkit.families.qwen3 import FAMILY as QWEN3

Layers = Callable[[Config, int], bool]

EVERYWHERE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
"""Every layer has experts, and the weights of those that are chosen sum to one."""

ONE_WINDOW = {"use_sliding_window": (False, None)}
"""The classes with experts do not look through windows in the same layers."""


def sparse(config: Config, layer: int) -> bool:
    """The layer has experts."""
    step = config["decoder_sparse_step"]
    return layer not in config["mlp_only_layers"] and (layer + 1) % step == 0


def dense(config: Config, layer: int) -> bool:
    """The layer has an MLP."""
    return not sparse(config, layer)


def check_step(config: Config) -> None:
    """Refuse a step between layers with experts that is none.

    Raises:
        InputError: names it.
    """
    if config["decoder_sparse_step"] < 1:
        raise InputError(
            f"config.json has decoder_sparse_step {config['decoder_sparse_step']}; a number from 1 "
            "upwards was expected"
        )


def arranged(config: Config, layers: Sequence[int]) -> Config:
    """Which layers have an MLP, in a model whose layers come from these."""
    wanted = [place for place, layer in enumerate(layers) if dense(config, layer)]
    if wanted == [place for place in range(len(layers)) if dense(config, place)]:
        return {}
    return {"decoder_sparse_step": 1, "mlp_only_layers": wanted}


def experts(width: str, layers: Layers, *, stacked: bool) -> tuple[Tensor, ...]:
    """A router and what it chooses from; ``width`` is the axis of one expert."""
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


def only(layers: Layers, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors that only some layers have."""
    return tuple(replace(each, layers=layers) for each in tensors)


def _tensors(*, stacked: bool) -> tuple[Tensor, ...]:
    mlp = only(dense, (each for each in QWEN3.tensors if each.name.startswith(MLP)))
    others = tuple(each for each in QWEN3.tensors if not each.name.startswith(MLP))
    return (*others, *mlp, *experts("expert_ffn", sparse, stacked=stacked))


FAMILY = replace(
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
    arranged=arranged,
    check=check_step,
    defaults={
        **QWEN3.defaults,
        "num_key_value_heads": 4,
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "layer_types": None,  # all layers look through a window, or none
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_tok": 8,
    },
    constants={"two": 2},
    experts=Experts(
        width="expert_ffn",
        dense={"qwen3": Dense(only=ONE_WINDOW)},
        config=EVERYWHERE,
    ),
    tensors=_tensors(stacked=False),
    other_forms=(_tensors(stacked=True),),
)
