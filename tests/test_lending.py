"""Weights on their way to the device: each is read once, the next layer's while one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.engine import lending
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise

CALLS = [Call(torch.arange(9)), Call(torch.arange(5))]
CPU = torch.device("cpu")


class Stream:
    """A stream that only notes who waited for it."""

    def __init__(self, *_: Any) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Streams as on a GPU, on any machine: order and bookkeeping, without anything at once."""
    here = Stream()

    @contextmanager
    def stream(_: Stream) -> Iterator[None]:
        yield

    make = lending.Lender.__init__

    def with_a_stream(self: lending.Lender, *args: Any) -> None:
        make(self, *args)
        self._copying = Stream()  # type: ignore[assignment]

    monkeypatch.setattr(lending.Lender, "__init__", with_a_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return here


def logits(model: Layerwise) -> list[Tensor]:
    for stage in model.stages(CALLS):
        states = stage.after
    with model.head() as head:
        return [head(state) for state in states]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, rows: slice | None = None) -> Tensor:
        names.append(name)
        return read(self, name, rows)

    monkeypatch.setattr(Checkpoint, "read", noted)
    return names


def test_the_next_layer_is_read_before_this_one_is_handed_on(
    make: Callable[..., Path], computing: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama", num_hidden_layers=3)
    names = reads(monkeypatch)
    model = Layerwise(Checkpoint(folder), torch.float32, CPU, None)
    for stage in model.stages(CALLS):
        if stage.layer is not None:
            read = {int(name.split(".")[2]) for name in names if ".layers." in name}
            assert read == set(range(min(stage.layer + 2, 3)))
            assert len(computing.waited_for) == stage.layer * 9  # tensors of the layers fetched
    assert len(names) == len(set(names))


def test_fetched_or_not_it_is_the_same(
    make: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    folder = make("diffllama", num_hidden_layers=3)
    plain = logits(Layerwise(Checkpoint(folder), torch.float64, CPU, None))
    request.getfixturevalue("computing")
    model = Layerwise(Checkpoint(folder), torch.float64, CPU, None)
    for stage in model.stages(CALLS):
        if stage.layer == 0:
            break  # what an abandoned run fetched is forgotten
    assert all(one.equal(other) for one, other in zip(plain, logits(model), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fetched_on_the_gpu_it_is_the_same(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cuda = make("llama", num_hidden_layers=4, hidden_size=64), torch.device("cuda")
    fetched = logits(Layerwise(Checkpoint(folder), torch.float64, cuda, None))
    monkeypatch.setattr(lending.Lender, "fetch", lambda self, module, names: None)
    plain = logits(Layerwise(Checkpoint(folder), torch.float64, cuda, None))
    assert all(one.equal(other) for one, other in zip(plain, fetched, strict=True))
