"""Every variant of attention, the same on whole maps, and transformers' DiffLlama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import DiffTransformerAttention
from growkit.extras.differential.modeling.seen_tokens import Visibility

DIFFLLAMA = "DiffLlama, sdpa"


@dataclass
class Shape:
    """Sizes that depend on the device."""

    hidden: int
    head_dim: int
    dtype: torch.dtype
    tolerance: float
    """Largest ‖difference‖ / ‖output‖ of two ways to compute the same."""


SHAPES = {
    "cpu": Shape(512, 32, torch.float32, 1e-4),
    "gpu": Shape(2048, 128, torch.bfloat16, 3e-2),
}


@dataclass
class Variant:
    """Numbers of heads, and what differs from DIFF."""

    signal: int = 8
    noise: int = 8
    keys: int = 8
    """Of signal and noise together."""
    value_width: int = 2
    """Of a value head, in multiples of head_dim."""
    switches: dict[str, Any] = field(default_factory=dict)


PLAIN = {"head_norm": "none", "head_output_scale": "none"}
CAUSAL = {"integral": "causal"}
SERIES = CAUSAL | {"integral_method": "series"}
SHARED = {"qk_projection": "shared", "shared_scope": "head"}
VARIANTS = {
    "softmax": Variant(16, 0, 8, 1, PLAIN),
    "DIFF": Variant(),
    "grouped DIFF 4:1": Variant(8, 2, 4),
    "V2": Variant(8, 8, 4, 1, PLAIN | {"noise_keys": "shared", "lambda_type": "projected"}),
    "Shared DIFF, head scope": Variant(switches=SHARED),
    "DINT causal, unified": Variant(switches=CAUSAL),
    "DINT causal, unified, series": Variant(switches=SERIES),
    "DINT causal, gated": Variant(switches=CAUSAL | {"gamma": "gated"}),
    "DINT causal, gated, series": Variant(switches=SERIES | {"gamma": "gated"}),
    "DINT column mean": Variant(switches={"integral": "column_mean"}),
    "grouped shared DINT 4:1": Variant(8, 2, 4, switches=SHARED | CAUSAL),
    "grouped shared DINT 4:1, series": Variant(8, 2, 4, switches=SHARED | SERIES),
}


def make(variant: Variant, shape: Shape, device: str) -> DiffTransformerAttention:
    config = DiffTransformerConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=variant.signal + variant.noise,
        num_noise_heads=variant.noise,
        num_key_value_heads=variant.keys,
        head_dim=shape.head_dim,
        value_head_dim=variant.value_width * shape.head_dim,
        shared_rank=shape.head_dim // 4,
        **variant.switches,
    )
    module = DiffTransformerAttention(config, layer_idx=0)
    for name, parameter in module.named_parameters():
        if name.startswith("lambda_") and parameter.dim() == 1:
            nn.init.normal_(parameter, 0, config.lambda_std_dev)
        elif name == "gamma_gate":
            nn.init.constant_(parameter, 0.5)
    return module.to(device, shape.dtype)


def make_diffllama(shape: Shape, device: str) -> DiffLlamaAttention:
    config = DiffLlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    return DiffLlamaAttention(config, layer_idx=0).to(device, shape.dtype)


def copy_of_diff(module: DiffTransformerAttention, copy: DiffLlamaAttention) -> None:
    """Give DiffLlama, which cuts each value head in two and puts all second halves last, DIFF's."""
    weights = {name: tensor for name, tensor in module.state_dict().items() if "norm" not in name}
    value = weights["v_proj.weight"]
    halves = value.view(-1, 2, module.config.head_dim, value.shape[1]).transpose(0, 1)
    copy.load_state_dict(weights | {"v_proj.weight": halves.reshape(value.shape)}, strict=True)


Positions = tuple[Tensor, Tensor]


def eager(module: DiffTransformerAttention, hidden: Tensor, positions: Positions) -> Tensor:
    """The same with whole maps; [1, N, hidden] to the same."""
    tokens = hidden.shape[1]
    visible = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=hidden.device).tril()
    return module(hidden, positions, visibility=Visibility(visible=visible, eager=True))[0]


Attend = Callable[[Tensor, Positions], Tensor]
"""[1, N, hidden] and cosines and sines to [1, N, hidden]."""


@dataclass
class Contender:
    """One way to attend."""

    module: nn.Module
    attend: Attend
    reference: bool = False
    """Whether it is a variant's eager version."""


def contenders(shape: Shape, device: str) -> dict[str, Contender]:
    """DiffLlama right before DIFF, and each variant right before its eager version."""
    every = {}
    modules = {name: make(variant, shape, device) for name, variant in VARIANTS.items()}
    diffllama = make_diffllama(shape, device)
    copy_of_diff(modules["DIFF"], diffllama)

    def of_module(module: nn.Module) -> Attend:
        return lambda hidden, positions: module(hidden, positions)[0]

    def of_eager(module: DiffTransformerAttention) -> Attend:
        return lambda hidden, positions: eager(module, hidden, positions)

    for name, module in modules.items():
        if name == "DIFF":
            every[DIFFLLAMA] = Contender(diffllama, of_module(diffllama))
        every[name] = Contender(module, of_module(module))
        every[eager_of(name)] = Contender(module, of_eager(module), reference=True)
    return every


def eager_of(name: str) -> str:
    return f"{name}, eager"
