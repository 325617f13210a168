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
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from growkit.algebra.axes import Role
from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.expansion import Factors as Numbers
from growkit.base.lazy import np
from growkit.base.tensors import TensorInfo
from growkit.results.operation import UpdateGroup, Updates

if TYPE_CHECKING:
    from growkit.planning.plan import Lineage, Plan

APART = "what is made of one tensor becomes several, which train apart"
INDEX = re.compile(r"(?<=\.)[0-9]+(?=\.)")
"""The number of a layer or an expert in the name of a tensor."""

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


@dataclass(frozen=True)
class Law:
    """How a whole target is to be updated.

    Attributes:
        updates: of every tensor.
        why: what keeps the target's training from being the source's, a phrase for each reason,
            with the number of tensors and the first of them; empty if it is the same but for what
            is new.
    """

    updates: Mapping[str, Update]
    why: tuple[str, ...]


def law_of(lineage: Lineage) -> Law:
    """The law for the target of a lineage."""
    current = {name: Update() for name in lineage.source.tensors}
    reasons: dict[str, None] = {}
    for plan in lineage.plans:
        current = stepped(plan, current)
        left_out = f"{plan.left_out[0]} of the source is left out" if plan.left_out else ""
        reasons |= dict.fromkeys(filter(None, [plan.apart, left_out]))
    found: dict[str, list[str]] = {}
    for name, update in current.items():
        if update.why and not update.new:
            found.setdefault(update.why, []).append(name)
    for why, names in found.items():
        of = names[0] if len(names) == 1 else f"{len(names)} tensors (first {names[0]})"
        reasons[f"{of}: {why}"] = None
    if lineage.promise == "different":
        reasons["it is not the same function"] = None
    return Law(current, tuple(reasons))


def stepped(plan: Plan, before: Mapping[str, Update]) -> dict[str, Update]:
    """The updates of a plan's targets, from those of its sources."""
    found = {
        rule.target: rule.transform.update([before[name] for name in rule.sources])
        for rule in plan.rules
    }
    rules = [rule for rule in plan.rules if not found[rule.target].new]
    uses = Counter(name for rule in rules for name in rule.sources)
    for rule in rules:
        if any(uses[name] > rule.transform.among for name in rule.sources):
            found[rule.target] = found[rule.target].because(APART)
    return found


def summary(law: Law, tensors: Mapping[str, TensorInfo]) -> Updates:
    """A law in a few lines, as manifests hold it: layers and experts that are alike are one line.

    Args:
        law: of a target.
        tensors: of the target.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    of_kind: dict[str, set[tuple[object, ...]]] = {}
    kinds = {name: INDEX.sub("*", name) for name in law.updates}
    for name, each in law.updates.items():
        key = (each.n_in, each.factor, each.new, *sorted(set(each.n_out.flat)))
        groups.setdefault(key, []).append(name)
        of_kind.setdefault(kinds[name], set()).add(key)
    listed = []
    for names in groups.values():
        update = law.updates[names[0]]
        shown = (kinds[name] if len(of_kind[kinds[name]]) == 1 else name for name in names)
        listed.append(
            UpdateGroup(
                tensors=list(dict.fromkeys(shown)),
                lr=update.rate,
                weight_decay=update.decay,
                eps=update.eps,
                n_in=update.n_in,
                n_out=sorted({float(number) for number in update.n_out.flat}),
                new=update.new,
            )
        )
    # AdamW moves every element by about its rate: the root mean square of all factors.
    total = sum(tensors[name].elements for name in law.updates)
    squares = sum(tensors[name].elements * each.rate**2 for name, each in law.updates.items())
    rate = math.sqrt(squares / total) if total else 1.0
    return Updates(exact=not law.why, why=list(law.why), single_rate=rate, groups=listed)


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
