"""Strict float64 is what it says: nothing narrower is ever computed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from growkit.engine.strict import strict_float64
from tests.conftest import CONFIGS

NARROW = {torch.float32, torch.float16, torch.bfloat16}


class Dtypes(TorchDispatchMode):
    """Records the float dtypes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen.add(value.dtype)
        return output


def dtypes_of_a_run(kind: str, strictly: bool) -> set[torch.dtype]:
    config = CONFIGS[kind](
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with strict_float64() if strictly else nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with Dtypes() as dtypes, torch.no_grad():
            model(torch.arange(5)[None])
    return dtypes.seen


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_nothing_narrower_is_computed(kind: str) -> None:
    assert dtypes_of_a_run(kind, strictly=True) == {torch.float64}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_without_it_float64_models_drop_to_float32(kind: str) -> None:
    assert dtypes_of_a_run(kind, strictly=False) & NARROW


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(RuntimeError, match="inside"), strict_float64():
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32
    assert torch.zeros(1).float().dtype is torch.float32
