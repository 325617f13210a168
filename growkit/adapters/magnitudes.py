"""Growth of DoRA's magnitudes (arXiv 2402.09353).

Each row of W + s·B·A is divided by its norm, and multiplied by its magnitude m. Splitting the
weight changes the norms; m' = m · ‖W' + s·B'·A'‖ / ‖W + s·B·A‖ keeps the function. m' is rounded
once, to float64, and stored so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from growkit.adapters.folder import MERGE
from growkit.algebra.law import Rows
from growkit.algebra.update import Update
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import AT_ONCE, TensorInfo, Weights
from growkit.planning.transforms import Kept, Mapped, Slices, Transform


@dataclass(frozen=True)
class Direction:
    """The matrix W + s·B·A, whose rows DoRA normalises.

    Attributes:
        model: holds W, [outputs, inputs].
        weight: name of W.
        transposed: whether W is stored as [inputs, outputs].
        adapter: holds A, [rank, inputs], and B, [outputs, rank].
        factors: names of A and B.
        scale: s.
    """

    model: Weights
    weight: str
    transposed: bool
    adapter: Weights
    factors: tuple[str, str]
    scale: float

    @cached_property
    def norms(self) -> Tensor:
        """The norm of every row, [outputs] in float64."""
        low, high = (self.adapter.read(name).double() for name in self.factors)
        step, found = max(1, AT_ONCE // max(1, low.shape[1])), []
        for begin in range(0, len(high), step):
            rows = slice(begin, min(begin + step, len(high)))
            where = (None, rows) if self.transposed else (rows, None)
            weight = self.model.read(self.weight, *where).double()
            update = self.scale * high[rows] @ low
            found.append(((weight.T if self.transposed else weight) + update).norm(dim=1))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Magnitudes(Transform):
    """The transform of a module's magnitudes.

    Attributes:
        copied: the transform that copies them with the outputs.
        before: the matrix of the source.
        after: the matrix of the target.
        split: the transform of the weight.
        stored: dtype of the source's magnitudes.
        holds: see ``Transform``; true unless ``stored`` is float64.
        repeatable: see ``Transform``; norms may have other last bits on another machine.
    """

    copied: Kept | Mapped
    before: Direction
    after: Direction
    split: Transform
    stored: str
    holds: bool
    repeatable: bool = False
    why: str = "scaled with the norms of the split weight"
    dtype: str | None = "F64"

    local = False

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return (self.copied,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: a row of the target is zero, so PEFT would divide by zero.
        """
        return self.copied.part(source, where).double() * self._ratios[where[0]]

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""

        def copies(of: slice) -> Tensor:
            return (rows(of) / self._ratios[of]).to(TensorInfo((), self.stored).torch_dtype)

        return self.copied.undo(copies, of)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; each of n equal parts of a row has 1/√n of its norm."""
        weight = self.split.update([Update()])
        made = self.copied.update(before).times(weight.factor / math.sqrt(weight.n_in))
        return made.because(weight.why)

    @cached_property
    def _ratios(self) -> Tensor:
        """The factor of every magnitude, [outputs]."""
        before, after = self.before.norms, self.after.norms
        if isinstance(self.copied, Mapped):
            before = before[torch.from_numpy(self.copied.maps[0].source)]
        if not (after.all() and before.all()):
            raise InputError(
                f"DoRA divides by the norms of rows, and some of {self.copied.source} are zero in "
                f"the grown model; choose other sizes, or {MERGE}"
            )
        return after / before
