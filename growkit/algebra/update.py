"""The law of updates: how a grown tensor must be updated to be trained as its source would be.

A weight that was split into n_in equal parts is updated n_in times, and the updates add up, so each
must be 1/n_in of the source's. A tensor that is read n_out times with equal shares passes 1/n_out
of the gradient to each of its copies, which Adam notices through its eps alone. Multiplying a
tensor by f multiplies its updates by f and its gradients by 1/f.

The law holds as long as the gradients of copies are equal, and nothing trains that the source does
not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from growkit.algebra.axes import Role
from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.expansion import Factors as Numbers
from growkit.base.lazy import np

MUON_ADJUSTMENTS: dict[str, Callable[[float, float], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""What ``torch.optim.Muon`` multiplies the rate of a matrix with, by ``adjust_lr_fn``."""


@dataclass(frozen=True, eq=False)
class Update:
    """How updates of a tensor follow from those of its sources.

    Attributes:
        n_in: number of parts into which a weight is split; of unequal shares, on average.
        n_out: number of copies that share a weight's gradient; broadcasts against the tensor, with
            one number in every dimension in which it is constant.
        factor: what the weights are multiplied by.
        new: whether no tensor of the source trains like it.
        why: why its training is not the source's, as it ends a sentence; empty where it is.
    """

    n_in: float = 1.0
    n_out: Numbers = field(default_factory=lambda: np.ones(()))
    factor: float = 1.0
    new: bool = False
    why: str = ""

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return self.factor / self.n_in

    @property
    def decay(self) -> float:
        """Factor of weight decay, which is itself multiplied by the rate."""
        return 1 / self.rate

    @property
    def gradient(self) -> Numbers:
        """Factor of gradients, and so of Adam's eps; see ``n_out`` for its shape."""
        return np.asarray(1 / (self.n_out * self.factor))

    @property
    def eps(self) -> float:
        """The one number that is nearest to ``gradient`` everywhere.

        An eps that is off by d changes an update by d / √v of it, where v is in proportion to the
        square of the gradient. The largest of these changes is least at 2 / (least n + most n).
        """
        if self.n_out.min() == self.n_out.max():
            return float(1 / (self.n_out.flat[0] * self.factor))
        return float(2 / ((self.n_out.min() + self.n_out.max()) * self.factor))

    def times(self, factor: float, copies: float = 1) -> Update:
        """The update of a multiple, or of one of several equal multiples, which share gradients."""
        n_out = self.n_out * copies if copies != 1 else self.n_out
        return replace(self, factor=self.factor * factor, n_out=n_out)

    def because(self, why: str) -> Update:
        """The same with a reason why training is not the source's; the first reason stays."""
        return self if self.why or not why else replace(self, why=why)

    def mapped(self, maps: Sequence[IndexMap]) -> Update:
        """The update of a tensor that is copied and split by these maps."""
        n_in, n_out, why = self.n_in, self.n_out, ""
        if not n_out.ndim:
            n_out = n_out.reshape((1,) * len(maps))
        for dimension, each in enumerate(maps):
            if n_out.shape[dimension] > 1:
                n_out = n_out.take(np.maximum(each.source, 0), dimension)
            if each.identity:
                continue
            shares, mean, problem = _shares(each)
            why = why or problem
            if each.role is Role.READ:
                n_in /= mean
                continue
            along = [-1 if d == dimension else 1 for d in range(len(maps))]
            n_out = n_out * (1 / shares).reshape(along)
            first = n_out.take([0], dimension)
            n_out = first if bool((n_out == first).all()) else n_out
        return replace(self, n_in=n_in, n_out=n_out).because(why)

    def whole(self) -> Update:
        """The update of any part of the tensor."""
        if self.n_out.size == 1:
            return self
        mean = np.full((1,) * self.n_out.ndim, 1 / self.eps / self.factor)
        return replace(self, n_out=mean).because("it is a part of rows whose gradients differ")


@lru_cache(maxsize=256)  # layers are alike
def _shares(mapped: IndexMap) -> tuple[Numbers, float, str]:
    """How the coordinates of a dimension are read.

    Returns:
        The share of every coordinate (1 for one that copies nothing), the mean of all that are
        read, and what keeps the law from holding, if anything does.
    """
    copies = mapped.source != NOTHING
    shares = np.where(copies, mapped.shares, 1.0)
    held, sources = shares[copies], mapped.source[copies]
    most, least = np.zeros(mapped.size), np.full(mapped.size, np.inf)
    np.maximum.at(most, sources, held)
    np.minimum.at(least, sources, held)
    why = ""
    if not copies.all() or mapped.fresh is not None:
        why = "it has coordinates that copy nothing"
    elif (most != least).any():
        why = "its copies have unequal shares"
    elif mapped.role is Role.READ and held.min() != held.max():
        why = "it reads coordinates that are copied unevenly"
    return np.where(shares == 0, 1.0, shares), float(held.mean()), why


def muon_rate(
    times: float, n_in: float, n_out: float, shape: tuple[int, int], adjust_lr_fn: str
) -> float:
    """The factor of Muon's rate for a matrix that is tiled (``torch/optim/_muon.py``).

    A matrix tiled a × b times is orthogonalised to the tiled one's share 1/√(a·b), and torch
    multiplies with a number of its own for the larger shape.

    Args:
        times: factor of the weights, besides their being split.
        n_in: number of parts into which they are split.
        n_out: number of copies among which their gradients are shared.
        shape: [rows, columns] of the grown matrix.
        adjust_lr_fn: that of Muon.
    """
    rows, columns = shape
    adjusted = MUON_ADJUSTMENTS[adjust_lr_fn]
    before = adjusted(rows / n_out, columns / n_in)
    return times * math.sqrt(n_out / n_in) * before / adjusted(rows, columns)
