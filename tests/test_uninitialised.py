"""Models that are built to be given other weights: without random numbers, with all else."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from growkit.engine.oracle import uninitialised
from growkit.modeling import register
from tests.architectures import config_of

register()


class Seen(TorchDispatchMode):
    """Notes the names of all operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op._overloadpacket.__name__)
        return op(*args, **(kwargs or {}))

    @property
    def random(self) -> set[str]:
        return self.names & {"normal", "normal_", "uniform", "uniform_", "trunc_normal_", "randn"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mamba", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_only_parameters_have_no_numbers(kind: str, device: str | None) -> None:
    """The control is the class itself: it draws random numbers, and has the same buffers."""
    built = []
    for context in (nullcontext(), uninitialised(device)):
        with Seen() as seen, context:
            built.append(AutoModelForCausalLM.from_config(config_of(kind)))
        assert bool(seen.random) == (len(built) == 1)
    expected, found = (dict(model.named_buffers()) for model in built)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    shapes = [
        {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        for model in built
    ]
    assert shapes[0] == shapes[1]
    assert built[1].all_tied_weights_keys == built[0].all_tied_weights_keys
    assert {p.device.type for p in built[1].parameters()} == {device or "cpu"}


def test_what_is_built_afterwards_is_initialised() -> None:
    with uninitialised():
        pass
    with Seen() as seen:
        torch.nn.Linear(2, 2)
    assert seen.random
