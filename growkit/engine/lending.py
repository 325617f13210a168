"""Weights that a module has only while it is needed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn

from growkit.checkpoint.tensors import (
    AT_ONCE,
    STORED_NAMES,
    TensorInfo,
    Weights,
    parts,
    total_bytes,
)
from growkit.engine.in_blocks import Rows, lend, suits, take_back

LARGE = 1 << 30
"""Bytes of a checkpoint from which on memory is worth more than the time to get it again."""


class Lender:
    """Lends the weights of a checkpoint to the modules of a model.

    Args:
        weights: the checkpoint.
        stored: from the name of a parameter to that of the tensor it is stored as.
        dtype: what weights are cast to.
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
        self._large = total_bytes(weights.tensors) >= LARGE
        self._fetched: dict[str, Tensor] = {}
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def tensor(self, name: str, rows: slice | None = None) -> Tensor:
        """A parameter, or some rows of it, as it is stored."""
        # Files hold float32 as float32, whatever arithmetic is to be done with it.
        with torch._C.DisableTorchFunction():
            return self._weights.read(self._stored(name), rows)

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
        """A buffer where it is needed; of a dtype that is no float, as it was."""
        tensor = self.tensor(name)
        return self.cast(tensor) if dtype.is_floating_point else tensor.to(self._device, dtype)

    def fetch(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy what ``lent`` will need to the GPU while it computes; nothing without a GPU.

        A stream of its own keeps the copies from waiting for the computation. What was fetched
        before and has not been lent is forgotten.
        """
        self._fetched.clear()
        if self._copying:
            with torch.cuda.stream(self._copying):
                for key, name in names.items():
                    in_blocks = self._in_blocks(*_owner(module, key), name)
                    self._fetched[name] = self._moved(name, cast=not in_blocks)

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
        empty = {key: owner._parameters[last] for key, (owner, last) in owners.items()}
        buffer: Tensor | None = None
        try:
            for key, (owner, last) in owners.items():
                name = names[key]
                if self._in_blocks(owner, last, name, head=head):
                    if buffer is None:
                        buffer = torch.empty(AT_ONCE, dtype=self._dtype, device=self._device)
                    lend(owner, self._stored_rows(name), self._info(name).shape, buffer)
                else:
                    owner._parameters[last] = nn.Parameter(self._ready(name, cast=True))
            yield
        finally:
            del buffer
            for key, (owner, last) in owners.items():
                take_back(owner)
                owner._parameters[last] = empty[key]
            if self._large:
                _return_memory()

    def _info(self, name: str) -> TensorInfo:
        return self._weights.tensors[self._stored(name)]

    def _in_blocks(self, owner: nn.Module, last: str, name: str, *, head: bool = False) -> bool:
        # Products of layers are taken as they will run, if nothing is cast.
        cast = getattr(torch, STORED_NAMES[self._info(name).dtype]) != self._dtype
        return (cast or head) and suits(owner, last, self._info(name))

    def _stored_rows(self, name: str) -> Rows:
        if self._device.type == "cpu" and self._weights.by_rows(self._stored(name)):
            return partial(self.tensor, name)
        return self._ready(name, cast=False).__getitem__

    def _moved(self, name: str, *, cast: bool) -> Tensor:
        tensor = self.tensor(name)
        return self.cast(tensor) if cast else tensor.to(self._device)

    def _ready(self, name: str, *, cast: bool) -> Tensor:
        fetched = self._fetched.pop(name, None)
        if fetched is None:
            return self._moved(name, cast=cast)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copying)  # type: ignore[arg-type]
        fetched.record_stream(computing)  # else the memory may be reused while it is read
        return fetched


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The submodule that has a parameter, and its name there."""
    path, _, last = key.rpartition(".")
    return module.get_submodule(path), last


def _return_memory() -> None:
    """Give the system back what is free.

    glibc keeps what lies between tensors that are still in use, a fifth of the peak (measured).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
