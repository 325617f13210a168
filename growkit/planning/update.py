"""How a grown tensor must be updated to be trained as what it is made of would be.

A weight that was split into n_in equal parts is updated n_in times, and the updates add up, so each
must be 1/n_in of the source's. What is read n_out times with equal shares hands 1/n_out of the
gradient to each of its copies, which Adam does not see but for its eps. Of a tensor that is
multiplied by f, the updates are f times as large and the gradients 1/f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from growkit.algebra.axes import Role
from growkit.algebra.expansion import NOTHING, Factors, IndexMap

ONE: Factors = np.ones(())
ONE.setflags(write=False)


@dataclass(frozen=True, eq=False)
class Update:
    """How updates of a tensor follow from those of what it is made of.

    Attributes:
        n_in: into how many parts a weight is split; of shares that differ, on average.
        n_out: of how many copies a weight is one that share its gradient; broadcasts against the
            tensor, with one number in every dimension in which it is the same everywhere.
        factor: what the weights are multiplied by.
        new: whether the source has nothing that trains like it.
        why: why its training is not the source's, as it ends a sentence; empty where it is.
    """

    n_in: float = 1.0
    n_out: Factors = field(default_factory=lambda: ONE)
    factor: float = 1.0
    new: bool = False
    why: str = ""

    @property
    def rate(self) -> float:
        """What the learning rate is multiplied by."""
        return self.factor / self.n_in

    @property
    def decay(self) -> float:
        """What weight decay is multiplied by, which is itself multiplied by the rate."""
        return 1 / self.rate

    @property
    def gradient(self) -> Factors:
        """What gradients are multiplied by, and so Adam's eps; see ``n_out`` for its shape."""
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

    @classmethod
    def begun(cls, why: str) -> Update:
        """Of a tensor that is new."""
        return cls(new=True, why=why)

    def times(self, factor: float) -> Update:
        """Of the same, multiplied."""
        return replace(self, factor=self.factor * factor)

    def shared(self, among: float) -> Update:
        """Of one of several tensors that are the same, and share the gradient."""
        return replace(self, n_out=self.n_out * among) if among != 1 else self

    def because(self, why: str) -> Update:
        """The same, where something keeps its training from being the source's."""
        return self if self.why or not why else replace(self, why=why)

    def mapped(self, maps: Sequence[IndexMap]) -> Update:
        """Of what is copied and split."""
        n_in, n_out, why = self.n_in, self.n_out, ""
        if not n_out.ndim:
            n_out = n_out.reshape((1,) * len(maps))
        for dimension, each in enumerate(maps):
            if n_out.shape[dimension] > 1:
                n_out = n_out.take(np.maximum(each.source, 0), dimension)
            if each.identity:
                continue
            found = _shares(each)
            why = why or found.why
            if each.role is Role.READ:
                n_in /= found.mean
            else:
                n_out = _narrow(n_out * _along(1 / found.each, dimension, len(maps)), dimension)
        return replace(self, n_in=n_in, n_out=n_out).because(why)

    def whole(self) -> Update:
        """Of a part of the tensor, wherever it lies."""
        if self.n_out.size == 1:
            return self
        mean = np.full((1,) * self.n_out.ndim, 1 / self.eps / self.factor)
        return replace(self, n_out=mean).because("it is a part of rows whose gradients differ")


@dataclass(frozen=True, eq=False)
class _Shares:
    """With what shares the coordinates of a dimension are read.

    Attributes:
        each: of every coordinate, 1 where nothing stands.
        mean: of all that is read, over the parts of a weight.
        why: what keeps the law from reaching it, if anything does.
    """

    each: Factors
    mean: float
    why: str


@lru_cache(maxsize=256)  # layers are alike
def _shares(mapped: IndexMap) -> _Shares:
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
    return _Shares(np.where(shares == 0, 1.0, shares), float(held.mean()), why)


def _along(numbers: Factors, dimension: int, dimensions: int) -> Factors:
    """Numbers of one dimension, to be multiplied with a tensor."""
    return numbers.reshape([-1 if each == dimension else 1 for each in range(dimensions)])


def _narrow(numbers: Factors, dimension: int) -> Factors:
    """The same with one number of a dimension, where all are equal."""
    first = numbers.take([0], dimension)
    return first if bool((numbers == first).all()) else numbers
