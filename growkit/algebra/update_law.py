"""The law of updates: updates with which a grown tensor trains as its source would.

The n_in equal parts of a weight are each updated, and their updates add up, so each update must be
1/n_in of the source's. Each of n_out copies that are read with equal shares gets 1/n_out of the
gradient, which affects Adam only through eps. Multiplying a tensor by f multiplies its updates by
f and its gradients by 1/f.

The law holds as long as the gradients of copies are equal and new parameters are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.expansion import Factors as Numbers
from growkit.base.axes import Role
from growkit.base.lazy import np


@dataclass(frozen=True, eq=False)
class Update:
    """The relation between the updates of a tensor and those of its sources.

    Attributes:
        n_in: number of parts into which a weight is split; an average for unequal shares.
        n_out: number of copies that share a weight's gradient; broadcasts against the tensor, with
            length 1 in every constant dimension.
        factor: factor of the weights.
        new: whether no tensor of the source trains like it.
        why: the reason why its training is not the source's, as the end of a sentence; empty if
            it is.
        together: number of consecutive rows that must stay equal, so that a router chooses the
            pieces of an MLP together.
    """

    n_in: float = 1.0
    n_out: Numbers = field(default_factory=lambda: np.ones(()))
    factor: float = 1.0
    new: bool = False
    why: str = ""
    together: int = 1

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return self.factor / self.n_in

    @property
    def decay(self) -> float:
        """Factor of weight decay, which optimizers multiply by the rate."""
        return 1 / self.rate

    @property
    def gradient(self) -> Numbers:
        """Factor of gradients, and so of Adam's eps; see ``n_out`` for its shape."""
        return np.asarray(1 / (self.n_out * self.factor))

    @property
    def eps(self) -> float:
        """The single number that is nearest to ``gradient`` everywhere.

        An error d of eps changes an update by d / √v of its size, where v is proportional to the
        squared gradient. The largest such change is smallest at 2 / (least n + most n).
        """
        if self.n_out.min() == self.n_out.max():
            return float(1 / (self.n_out.flat[0] * self.factor))
        return float(2 / ((self.n_out.min() + self.n_out.max()) * self.factor))

    def times(self, factor: float, copies: float = 1) -> Update:
        """The update of a multiple, or of one of several equal copies that share gradients."""
        n_out = self.n_out * copies if copies != 1 else self.n_out
        return replace(self, factor=self.factor * factor, n_out=n_out)

    def because(self, why: str) -> Update:
        """Add a reason why training is not the source's; an earlier reason is kept."""
        return self if self.why or not why else replace(self, why=why)

    def mapped(self, maps: Sequence[IndexMap]) -> Update:
        """The update of a tensor that is copied and split by these maps."""
        n_in, n_out, why = self.n_in, self.n_out, ""
        if not n_out.ndim:
            n_out = n_out.reshape((1,) * len(maps))
        for dimension, mapped in enumerate(maps):
            if n_out.shape[dimension] > 1:
                n_out = n_out.take(np.maximum(mapped.source, 0), dimension)
            if mapped.identity:
                continue
            shares, mean, problem = _shares(mapped)
            why = why or problem
            if mapped.role is Role.READ:
                n_in /= mean
                continue
            along = [-1 if d == dimension else 1 for d in range(len(maps))]
            n_out = n_out * (1 / shares).reshape(along)
            first = n_out.take([0], dimension)
            n_out = first if bool((n_out == first).all()) else n_out
        return replace(self, n_in=n_in, n_out=n_out).because(why)

    def whole(self) -> Update:
        """The update of a tensor of any shape that is made of this one, such as a part."""
        mean = replace(self, n_out=np.asarray(1 / self.eps / self.factor))
        if self.n_out.size == 1:
            return mean
        return mean.because("it is a part of rows whose gradients differ")


@lru_cache(maxsize=256)  # layers are alike
def _shares(mapped: IndexMap) -> tuple[Numbers, float, str]:
    """Compute the shares of a dimension's coordinates.

    Returns:
        The share of every coordinate (1 if it copies nothing or has share 0), the mean share of
        copies, and the reason why the law does not hold, empty if it does.
    """
    copies = mapped.source != NOTHING
    shares = np.where(copies, mapped.shares, 1.0)
    held, sources = shares[copies], mapped.source[copies]
    largest, least = np.zeros(mapped.size), np.full(mapped.size, np.inf)
    np.maximum.at(largest, sources, held)
    np.minimum.at(least, sources, held)
    why = ""
    if not copies.all() or mapped.fresh is not None:
        why = "it has coordinates that copy nothing"
    elif (largest != least).any():
        why = "its copies have unequal shares"
    elif mapped.role is Role.READ and held.min() != held.max():
        why = "it reads coordinates that are copied unevenly"
    return np.where(shares == 0, 1.0, shares), float(held.mean()), why
