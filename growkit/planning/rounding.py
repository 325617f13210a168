"""Tensors that round as they grow: they are multiplied by a number that is no power of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import TORCH_NAMES, Weights
from growkit.planning.transform import Slices
from growkit.planning.transforms import Mapped

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.law import Rows
    from growkit.planning.update import Update


@dataclass(frozen=True, eq=False)
class Rounded(Mapped):
    """A tensor as ``Mapped`` makes it, times any number: every element is rounded once.

    It does not give its source back, bit for bit; making it again gives the same bits.
    """

    holds = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        import torch

        from growkit.algebra.law import grow

        dtype: torch.dtype = getattr(torch, TORCH_NAMES[source.tensors[self.source].dtype])
        wide = dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32

        def read(rows: slice, columns: slice | None = None) -> Tensor:
            return source.read(self.source, rows, columns).to(wide) + self.offset

        grown = grow(read, self.maps, self.name, self.shares, where)
        return (grown.double() * self.factor - self.offset).to(dtype)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return super().update(before).because("it is rounded")

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Nothing comes back bit for bit."""
        return None
