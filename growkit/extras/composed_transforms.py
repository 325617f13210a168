"""Transforms of whole tensors: computed from them, a part of one, or several in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from growkit.algebra.update_law import Update
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Weights
from growkit.planning.transforms import Slices, Transform


@dataclass(frozen=True)
class Computed(Transform):
    """A tensor computed from whole sources, which cannot be recovered.

    Attributes:
        names: names of the sources.
        why: one phrase for users.
        compute: computes the target from the sources, in the order of ``names``.
        repeatable: see ``Transform``.
        together: see ``Update``.
    """

    names: tuple[str, ...]
    why: str
    compute: Callable[..., Tensor]
    repeatable: bool = True
    dtype: str | None = None
    together: int = 1

    local = False

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return self.names

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``; computes the whole target."""
        return self.compute(*map(source.read, self.names))[tuple(where)]

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; no factor follows for a computed tensor."""
        if not before:
            return Update(new=True, why=self.why, together=self.together)
        update = replace(before[0], together=1)
        return update.because(f"it is computed ({self.why})").whole()


@dataclass(frozen=True, eq=False)
class Subtensor(Transform):
    """A rectangle of another transform's target, such as a piece of an MLP.

    Its source cannot be recovered, so a proof computes it again and compares.

    Attributes:
        whole: the transform of the whole tensor.
        begin: first index of the rectangle in every dimension.
        why: one phrase for users.
    """

    whole: Transform
    begin: tuple[int, ...]
    why: str

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return (self.whole,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        moved = zip(where, self.begin, strict=True)
        return self.whole.part(source, [slice(w.start + b, w.stop + b) for w, b in moved])

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return self.whole.update(before).whole()


@dataclass(frozen=True, eq=False)
class Stacked(Transform):
    """A stack of matrices, each with the rows of several targets one below the other.

    Attributes:
        matrices: for each matrix, the transforms of its parts with the number of rows of each.
        why: one phrase for users.
    """

    matrices: Sequence[Sequence[tuple[Transform, int]]]
    why: str

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return [part for parts in self.matrices for part, _ in parts]

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        numbers, rows, columns = where
        matrices = []
        for parts in self.matrices[numbers]:
            blocks, end = [], 0
            for part, count in parts:
                start, end = end, end + count
                inside = slice(max(rows.start, start) - start, min(rows.stop, end) - start)
                if inside.start < inside.stop:
                    blocks.append(part.part(source, (inside, columns)))
            matrices.append(torch.cat(blocks))
        return torch.stack(matrices)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        by_name = dict(zip(self.sources, before, strict=True))
        first, *others = (
            part.update([by_name[name] for name in part.sources]).whole() for part in self.parts
        )
        return first.because("its matrices train separately") if others else first
