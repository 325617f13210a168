"""Sections and stacks: tensors that are a part of what a transform makes, or several of these.

A target may hold in several tensors what its source holds in one: the pieces of an MLP, or parts
that sum to it. Or the other way round. No single one of them gives a source tensor back, so a proof
makes them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import Weights
from growkit.planning.transform import Slices, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.law import Rows
    from growkit.planning.update import Update


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
    among = 1

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

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return self.whole.update(before).whole()

    def moments(self, order: int) -> Transform | None:
        """See ``Transform``."""
        whole = self.whole.moments(order)
        return None if whole is None else Section(whole, self.begin, self.why)


@dataclass(frozen=True, eq=False)
class Stacked:
    """Matrices, each put together of the rows of several, in one tensor of three dimensions.

    Attributes:
        matrices: for every matrix what makes its parts, and the number of rows of each.
        why: one phrase for people.
    """

    matrices: Sequence[Sequence[tuple[Transform, int]]]
    why: str

    holds = False
    period = None
    among = 1

    @property
    def _parts(self) -> list[Transform]:
        return [part for parts in self.matrices for part, _ in parts]

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.sources))

    @property
    def local(self) -> bool:
        """See ``Transform``."""
        return all(part.local for part in self._parts)

    @property
    def repeatable(self) -> bool:
        """See ``Transform``."""
        return all(part.repeatable for part in self._parts)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        import torch

        numbers, rows, columns = where
        made = [_joined(source, parts, rows, columns) for parts in self.matrices[numbers]]
        if made:
            return torch.stack(made)
        nothing = _joined(source, self.matrices[0], slice(0, 0), columns)
        return nothing.new_empty(0, rows.stop - rows.start, columns.stop - columns.start)

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """There is more than one source."""
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is asked of these."""
        return iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        by_name = dict(zip(self.sources, before, strict=True))
        first, *others = (
            part.update([by_name[name] for name in part.sources]).whole() for part in self._parts
        )
        return first.because("its matrices train apart") if others else first

    def moments(self, order: int) -> Transform | None:
        """See ``Transform``."""
        made = [[(part.moments(order), rows) for part, rows in parts] for parts in self.matrices]
        known = [[(part, rows) for part, rows in parts if part] for parts in made]
        return Stacked(known, self.why) if known == made else None


def _joined(
    source: Weights, parts: Sequence[tuple[Transform, int]], rows: slice, columns: slice
) -> Tensor:
    """Some rows of a matrix that is put together of others."""
    import torch

    found, end = [], 0
    for part, count in parts:
        begin, end = end, end + count
        inside = slice(max(rows.start, begin) - begin, min(rows.stop, end) - begin)
        if inside.start < inside.stop:
            found.append(part.part(source, (inside, columns)))
    return torch.cat(found) if found else parts[0][0].part(source, (slice(0, 0), columns))
