"""Magnitudes of DoRA (arXiv 2402.09353), as a weight is grown whose rows they are the norms of.

A row of W + s·B·A is divided by its norm, and multiplied by its magnitude m. Where the weight is
split, norms are others; the function stays with m' = m · ‖W' + s·B'·A'‖ / ‖W + s·B·A‖. The quotient
is stored in float64, in which it is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from growkit.adapters.methods import MERGE
from growkit.algebra.law import Rows
from growkit.algebra.update import Update
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import AT_ONCE, TensorInfo, Weights
from growkit.planning.transforms import Kept, Mapped, Slices, Transform


@dataclass(frozen=True)
class Direction:
    """What magnitudes are multiplied with once it is divided by its norms: W + s·B·A.

    Attributes:
        model: has W, [outputs, inputs].
        weight: its name.
        turned: whether W is stored as [inputs, outputs].
        adapter: has A, [rank, inputs], and B, [outputs, rank].
        factors: the names of these.
        scale: s.
    """

    model: Weights
    weight: str
    turned: bool
    adapter: Weights
    factors: tuple[str, str]
    scale: float

    @cached_property
    def norms(self) -> Tensor:
        """Of the weights of every output, [outputs] in float64."""
        low, high = (self.adapter.read(name).double() for name in self.factors)
        step, found = max(1, AT_ONCE // max(1, low.shape[1])), []
        for begin in range(0, len(high), step):
            rows = slice(begin, min(begin + step, len(high)))
            where = (None, rows) if self.turned else (rows, None)
            weight = self.model.read(self.weight, *where).double()
            update = self.scale * high[rows] @ low
            found.append(((weight.T if self.turned else weight) + update).norm(dim=1))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Magnitudes(Transform):
    """How the magnitudes of a module are made.

    Attributes:
        copied: copies them for copies of outputs.
        before: of the source.
        after: of the target.
        split: how the weight is made.
        stored: dtype of the source's.
        holds: see ``Transform``: all but those in float64 come back bit for bit.
        repeatable: see ``Transform``; norms may have other last bits elsewhere.
    """

    copied: Kept | Mapped
    before: Direction
    after: Direction
    split: Transform
    stored: str
    holds: bool
    repeatable: bool = False
    why: str = "norms of the weight that is split"
    dtype: str | None = "F64"

    local = False

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return (self.copied,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: a row of the target is zero, by whose norm PEFT would divide.
        """
        return self.copied.part(source, where).double() * self._ratios[where[0]]

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""

        def copies(of: slice) -> Tensor:
            return (rows(of) / self._ratios[of]).to(TensorInfo((), self.stored).torch_dtype)

        return self.copied.undo(copies, of)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; equal parts of a row have norms of 1/√n of the row's."""
        weight = self.split.update([Update()])
        made = self.copied.update(before).times(weight.factor / math.sqrt(weight.n_in))
        return made.because(weight.why)

    @cached_property
    def _ratios(self) -> Tensor:
        """By what each is multiplied, [outputs]."""
        before, after = self.before.norms, self.after.norms
        if isinstance(self.copied, Mapped):
            before = before[torch.from_numpy(self.copied.maps[0].source)]
        if not (after.all() and before.all()):
            raise InputError(
                f"DoRA divides by the norms of rows, and some of {self.copied.source} are zero in "
                f"the grown model; choose other sizes, or {MERGE}"
            )
        return after / before
