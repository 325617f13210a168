"""What torch computes: in strict float64 nothing narrower, without weights nothing random."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from growkit.engine.oracle import uninitialised
from growkit.engine.strict import strict_float64
from growkit.modeling import register
from tests.architectures import config_of
from tests.conftest import CONFIGS

register()

NARROW = {torch.float32, torch.float16, torch.bfloat16}
RANDOM = {"normal", "normal_", "uniform", "uniform_", "trunc_normal_", "randn"}


class Seen(TorchDispatchMode):
    """Records the names of all operations, and the float dtypes of what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op._overloadpacket.__name__)
        output = op(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.dtypes.add(value.dtype)
        return output


@pytest.mark.parametrize("strictly", [True, False])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_nothing_narrower_is_computed(kind: str, strictly: bool) -> None:
    """Without strict float64, models in float64 compute in float32 as well: the control."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with strict_float64() if strictly else nullcontext():
        config = CONFIGS[kind](vocab_size=11, **sizes, **heads)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with Seen() as seen, torch.no_grad():
            model(torch.arange(5)[None])
    assert bool(seen.dtypes & NARROW) is not strictly
    assert torch.float64 in seen.dtypes


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(RuntimeError, match="inside"), strict_float64():
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32
    assert torch.zeros(1).float().dtype is torch.float32


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mamba", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_only_parameters_have_no_numbers(kind: str, device: str | None) -> None:
    """The control is the class itself: it draws random numbers, and has the same buffers."""
    built = []
    for context in (nullcontext(), uninitialised(device), nullcontext()):
        with Seen() as seen, context:
            built.append(AutoModelForCausalLM.from_config(config_of(kind)))
        assert bool(seen.names & RANDOM) == (len(built) != 2)
    expected, found = (dict(model.named_buffers()) for model in built[:2])
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    shapes = [
        {n: p.shape for n, p in each.named_parameters(remove_duplicate=False)} for each in built
    ]
    assert shapes[0] == shapes[1]
    assert built[1].all_tied_weights_keys == built[0].all_tied_weights_keys
    assert {p.device.type for p in built[1].parameters()} == {device or "cpu"}
