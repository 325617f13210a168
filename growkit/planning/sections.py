"""Sections: tensors that are a part of what a transform makes.

What a source holds in one tensor, a target may hold in several: the pieces of an MLP, or parts that
sum to it. None of them gives the source back alone, so a proof makes them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import Weights
from growkit.planning.transforms import Slices, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.law import Rows


@dataclass(frozen=True, eq=False)
class Section:
    """A rectangle of what another transform makes.

    Attributes:
        whole: makes all of it.
        begin: where the rectangle begins in every dimension.
        why: one phrase for people.
    """

    whole: Transform
    begin: tuple[int, ...]
    why: str

    holds = False
    period = None

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return self.whole.sources

    @property
    def local(self) -> bool:
        """See ``Transform``."""
        return self.whole.local

    @property
    def repeatable(self) -> bool:
        """See ``Transform``."""
        return self.whole.repeatable

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        moved = zip(where, self.begin, strict=True)
        return self.whole.part(source, [slice(w.start + b, w.stop + b) for w, b in moved])

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """A part is not enough."""
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is copied."""
        return iter(())

    def moments(self, order: int) -> Transform | None:
        """See ``Transform``."""
        whole = self.whole.moments(order)
        return None if whole is None else Section(whole, self.begin, self.why)
