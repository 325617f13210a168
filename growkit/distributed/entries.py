"""Tensors that are made on demand, a slab at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import TORCH_NAMES, TensorInfo
from growkit.planning.plan import AT_A_TIME
from growkit.planning.transform import Slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ANYWHERE = 1 << 10
"""Dimensions that may be cut, where all of them may."""


@dataclass(frozen=True)
class Entry:
    """A tensor.

    Attributes:
        info: its shape and dtype.
        make: gives a part of it, by begin and end in every dimension.
        cuts: how many dimensions, from the first on, can be cut so that a part is made without the
            rest; none of what is computed as a whole.
    """

    info: TensorInfo
    make: Callable[[Slices], Tensor]
    cuts: int = ANYWHERE

    @property
    def dtype(self) -> torch.dtype:
        """As torch calls it."""
        import torch

        found: torch.dtype = getattr(torch, TORCH_NAMES[self.info.dtype])
        return found

    @property
    def everything(self) -> list[slice]:
        """Begin and end of the whole."""
        return [slice(0, size) for size in self.info.shape]


class Entries(Mapping[str, Entry]):
    """Tensors by name.

    What can only be computed as a whole is computed once while parts of it are asked for one after
    the other, and kept until another is.
    """

    def __init__(self, entries: Iterable[tuple[str, Entry]]) -> None:
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
        for slab in slabs(where, entry.cuts):
            inside = zip(slab, where, strict=True)
            place = tuple(slice(s.start - w.start, s.stop - w.start) for s, w in inside)
            into[place].copy_(entry.make(slab))

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
                self._whole = (name, entry.make(entry.everything))
            return self._whole[1]


def slabs(where: Slices, cuts: int = ANYWHERE, most: int = AT_A_TIME) -> Iterator[Sequence[slice]]:
    """Parts of a part, of at most so many elements where that can be had.

    Args:
        where: begin and end in every dimension.
        cuts: how many dimensions, from the first on, may be cut.
        most: elements of a slab.
    """
    sizes = [each.stop - each.start for each in where]
    if 0 in sizes:
        return
    if prod(sizes) <= most or not cuts:
        yield where
        return
    first, *others = where
    step = max(1, most // prod(sizes[1:]))
    for begin in range(first.start, first.stop, step):
        rows = slice(begin, min(begin + step, first.stop))
        for rest in slabs(others, cuts - 1, most) if step == 1 else [others]:
            yield [rows, *rest]
