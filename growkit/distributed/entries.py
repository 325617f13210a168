"""Tensors that are made on demand, a slab at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from growkit.checkpoint.tensors import TORCH_NAMES, TensorInfo, Weights, slabs
from growkit.planning.transforms import Slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Entry(NamedTuple):
    """A tensor, and what makes it."""

    weights: Weights
    name: str

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""
        return self.weights.tensors[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """As torch calls it."""
        import torch

        found: torch.dtype = getattr(torch, TORCH_NAMES[self.info.dtype])
        return found

    @property
    def cuts(self) -> int:
        """See ``Weights``."""
        return self.weights.cuts(self.name)


class Entries(Mapping[str, Entry]):
    """Tensors by name.

    What can only be computed as a whole is computed once while parts of it are asked for one after
    the other, and kept until another is.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._whole: tuple[str, Tensor] | None = None
        self._lock = Lock()  # transformers reads in several threads

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, into: Tensor, name: str, where: Slices) -> None:
        """Write a part of a tensor into another one of its shape, of its dtype or a wider one.

        Raises:
            InputError: what it is made from cannot be read.
        """
        entry = self._entries[name]
        if not entry.cuts:
            into.copy_(self._made(name, entry)[tuple(where)])
            return
        for slab in slabs(entry.info.shape, entry.cuts, where=where):
            inside = zip(slab, where, strict=True)
            place = tuple(slice(s.start - w.start, s.stop - w.start) for s, w in inside)
            into[place].copy_(entry.weights.read(entry.name, *slab))

    def part(self, name: str, where: Slices) -> Tensor:
        """A part of a tensor; see ``fill``."""
        import torch

        entry = self._entries[name]
        made = torch.empty([each.stop - each.start for each in where], dtype=entry.dtype)
        self.fill(made, name, where)
        return made

    def _made(self, name: str, entry: Entry) -> Tensor:
        with self._lock:
            if self._whole is None or self._whole[0] != name:
                self._whole = None  # never are two of them in memory
                self._whole = name, entry.weights.read(entry.name)
            return self._whole[1]
