"""Weights that a module has only while it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from growkit.checkpoint.memory import give_back, keep_freed
from growkit.checkpoint.tensors import (
    AT_ONCE,
    STORED_NAMES,
    TensorInfo,
    Weights,
    parts,
    total_bytes,
)
from growkit.engine import experts
from growkit.engine.in_blocks import InBlocks, Rows, lend, suits, take_back

LARGE = 1 << 30
"""Bytes of a checkpoint from which on memory is worth more than the time to get it again; of
smaller ones, as much is kept for the next layer."""


class Lender:
    """Lends the weights of a checkpoint to the modules of a model.

    Args:
        weights: the checkpoint.
        stored: from the name of a parameter to that of the tensor it is stored as.
        dtype: what weights are cast to, but for those that the class keeps in another.
        device: where they are needed.
    """

    def __init__(
        self,
        weights: Weights,
        stored: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights, self._stored = weights, stored
        self._dtype, self._device = dtype, device
        tensors = weights.tensors
        self._large = total_bytes(tensors) >= LARGE or any(map(experts.suits, tensors.values()))
        if not self._large:
            keep_freed(LARGE)
        self._fetched: dict[str, Tensor] = {}
        self._steps: Mapping[str, Tensor] = {}
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def tensor(self, name: str, rows: slice | None = None) -> Tensor:
        """A parameter, or some rows of it, as it is stored."""
        # Files hold float32 as float32, whatever arithmetic is to be done with it.
        with torch._C.DisableTorchFunction():
            found = self._weights.read(self._stored(name), rows)
            if name in self._steps:
                found = found.double() - self._steps[name][rows or slice(None)].to(found.device)
            return found

    @contextmanager
    def stepped(self, steps: Mapping[str, Tensor]) -> Iterator[None]:
        """Lend some parameters, by their names in the model, as they are after a step."""
        self._steps = steps
        try:
            yield
        finally:
            self._steps = {}

    def rows(self, name: str, used: Tensor) -> Tensor:
        """Some rows of a parameter as they are needed, [rows, columns]; ``used`` are in order."""
        found = []
        for part in parts(self._weights, self._stored(name)):
            here = used[(used >= part.start) & (used < part.stop)] - part.start
            found.append(self.cast(self.tensor(name, part)[here]))
        return torch.cat(found)

    def cast(self, tensor: Tensor) -> Tensor:
        """As it is needed, where it is needed."""
        return tensor.to(self._device, self._dtype)

    def buffer(self, name: str, dtype: torch.dtype) -> Tensor:
        """A buffer where it is needed, in the dtype that the class has for it."""
        return self._moved(name, dtype)

    def fetch(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy what ``lent`` will need to the GPU while it computes; nothing without a GPU.

        A stream of its own keeps the copies from waiting for the computation. What was fetched
        before and has not been lent is forgotten.
        """
        self._fetched.clear()
        if self._copying:
            with torch.cuda.stream(self._copying):
                for key, name in names.items():
                    owner, last = _owner(module, key)
                    as_stored = self._in_blocks(owner, last, name) or self._experts(
                        owner, last, name
                    )
                    dtype = None if as_stored else _parameter(owner, last).dtype
                    self._fetched[name] = self._moved(name, dtype)

    @contextmanager
    def lent(
        self, module: nn.Module, names: Mapping[str, str], *, head: bool = False
    ) -> Iterator[None]:
        """A module with these parameters, by their names in the model; and without them again.

        Args:
            module: the module.
            names: from names of parameters in it to those in the model.
            head: whether it is the output head, which may be larger than any layer.
        """
        owners = {key: _owner(module, key) for key in names}
        empty = {key: _parameter(owner, last) for key, (owner, last) in owners.items()}
        buffer: Tensor | None = None
        try:
            for key, (owner, last) in owners.items():
                name = names[key]
                if self._in_blocks(owner, last, name, head=head):
                    if buffer is None:
                        buffer = torch.empty(AT_ONCE, dtype=self._dtype, device=self._device)
                    lend(owner, self._stored_rows(name), self._info(name).shape, buffer)
                elif self._experts(owner, last, name):
                    one = torch.zeros(1, dtype=self._dtype, device=self._device)
                    like = one.expand(self._info(name).shape)
                    experts.lend(owner, last, self._stored_rows(name), like)
                else:
                    ready = self._ready(name, empty[key].dtype)
                    owner._parameters[last] = nn.Parameter(ready, ready.is_floating_point())
            yield
        finally:
            del buffer
            for key, (owner, last) in owners.items():
                take_back(owner)
                experts.take_back(owner, last)
                owner._parameters[last] = empty[key]
            if self._large:
                give_back()

    def _info(self, name: str) -> TensorInfo:
        return self._weights.tensors[self._stored(name)]

    def _in_blocks(self, owner: nn.Module, last: str, name: str, *, head: bool = False) -> bool:
        # Products of layers are taken as they will run, if nothing is cast.
        wanted = _parameter(owner, last).dtype == self._dtype
        return wanted and (self._is_cast(name) or head) and suits(owner, last, self._info(name))

    def _experts(self, owner: nn.Module, last: str, name: str) -> bool:
        wanted = _parameter(owner, last).dtype == self._dtype
        return wanted and self._is_cast(name) and experts.suits(self._info(name))

    def _is_cast(self, name: str) -> bool:
        return _torch_dtype(self._info(name)) != self._dtype

    def _stored_rows(self, name: str) -> Rows:
        if self._device.type == "cpu" and self._weights.cuts(self._stored(name)):
            return partial(self.tensor, name)
        return self._ready(name, None).__getitem__

    def _moved(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """A parameter where it is needed, in this dtype; None for that in which it is stored.

        It is never whole in both.
        """
        info, places = self._info(name), parts(self._weights, self._stored(name))
        if len(places) == 1 or dtype in (None, _torch_dtype(info)):
            return self.tensor(name).to(self._device, dtype)
        with torch._C.DisableTorchFunction():
            whole = torch.empty(info.shape, dtype=dtype, device=self._device)
            for rows in places:
                whole[rows] = self.tensor(name, rows)
        return whole

    def _ready(self, name: str, dtype: torch.dtype | None) -> Tensor:
        fetched = self._fetched.pop(name, None)
        if fetched is None:
            return self._moved(name, dtype)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copying)  # type: ignore[arg-type]
        fetched.record_stream(computing)  # else the memory may be reused while it is read
        return fetched


@contextmanager
def scaled(layer: nn.Module, key: str, factor: float) -> Iterator[None]:
    """A layer with one of its parameters multiplied."""
    path, _, last = key.rpartition(".")
    owner = layer.get_submodule(path)
    lent = vars(owner).get(last, owner if last == "weight" else None)
    if isinstance(lent, InBlocks | experts.Experts):
        lent.factor = factor
        yield
        lent.factor = 1.0
    else:
        parameter = layer.get_parameter(key)
        unscaled, parameter.data = parameter.data, parameter.data * factor
        yield
        parameter.data = unscaled


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The submodule that has a parameter, and its name there."""
    path, _, last = key.rpartition(".")
    return module.get_submodule(path), last


def _parameter(owner: nn.Module, last: str) -> nn.Parameter:
    """A parameter of a module, with or without data."""
    found = owner._parameters[last]
    assert found is not None
    return found


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, STORED_NAMES[info.dtype])
    return dtype
