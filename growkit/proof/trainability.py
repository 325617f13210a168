"""Can the new capacity train? Copies that receive equal gradients stay equal for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from growkit.plan import Plan
from growkit.proof import CopyDistance, Trainability

EQUAL = 1e-9
"""Relative difference below which two gradients in float64 are the same but for rounding."""


TINY = 1e-300
"""Keeps zeros from being divided by."""

MOST_RANK = 256
"""Rank up to which singular values are computed."""

MOST_NAMES = 8
"""Parameters without gradient that are named."""

AT_ONCE = 1 << 20
"""Elements of a gradient that are compared at a time."""

Named = tuple[str, Tensor]


class Gradients:
    """Looks at gradients, one tensor at a time.

    Args:
        plans: all plans; the copies are those of the last growth.
        as_stored: from the name of a parameter and its gradient to those of a tensor in the files.
    """

    def __init__(self, plans: Sequence[Plan], as_stored: Callable[[str, Tensor], Named]) -> None:
        growths = [index for index, plan in enumerate(plans) if plan.copies]
        self.any_copies = bool(growths)
        last = growths[-1] if growths else len(plans)
        self._later = plans[last + 1 :]
        self._rules = {rule.target: rule for plan in plans[last : last + 1] for rule in plan.rules}
        self._as_stored = as_stored
        self._count = _Count()
        self._with_gradient: set[str] = set()
        self.symmetry: list[CopyDistance] = []

    def look(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a parameter into account."""
        if bool(gradient.any()):
            self._with_gradient.add(name)
        grown = self._as_grown(*self._as_stored(name, gradient)) if self._rules else None
        rule = self._rules.get(grown[0]) if grown else None
        if grown and rule:
            for copies in rule.transform.copies(grown[1]):
                distance = _compare(grown[0], copies, self._count)
                self.symmetry.append(
                    CopyDistance(
                        tensor=grown[0],
                        copies=len(copies),
                        relative_distance=distance,
                        effective_rank_gain=_rank_gain(copies),
                    )
                )

    def found(self, names: Iterable[str]) -> Trainability:
        """What the gradients say; ``names`` are those of all parameters."""
        count = self._count
        silent = sorted(set(names) - self._with_gradient)
        return Trainability(
            trainable=not count.stuck and not silent,
            copied=count.copied,
            identical_gradients=count.stuck,
            without_gradient=count.without,
            first_identical=count.first,
            silent_parameters=silent[:MOST_NAMES],
        )

    def _as_grown(self, name: str, gradient: Tensor) -> Named | None:
        """As the growth left it: what came after it is undone; None for what is no tensor of it."""
        for plan in reversed(self._later):
            rule = plan.by_target[name]
            if not rule.transform.holds:
                return None
            (name,) = rule.sources
            back = rule.transform.undo(gradient.__getitem__, slice(0, len(gradient)))
            if back is None:
                return None
            gradient = back
        return name, gradient


@dataclass
class _Count:
    copied: int = 0
    stuck: int = 0
    without: int = 0
    first: str | None = None


def _compare(name: str, copies: list[Tensor], count: _Count) -> float:
    """Count rows, and give the median distance of their copies, relative to their size."""
    # A copy is a view of the whole gradient, and some rows of it at a time are looked at.
    parts = zip(*(copy.split(max(1, AT_ONCE // copy.shape[1])) for copy in copies), strict=True)
    scales, distances = zip(*(_distances(part) for part in parts), strict=True)
    scale, distance = torch.cat(scales), torch.cat(distances)
    stuck = (distance <= EQUAL) & (scale > 0)
    count.copied += len(scale)
    count.stuck += int(stuck.sum())
    count.without += int((scale == 0).sum())
    if bool(stuck.any()) and count.first is None:
        count.first = name
    return float(distance.median())


def _distances(copies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The size of every row's gradient, and how far its two closest copies are apart."""
    scale = torch.stack([copy.abs().amax(1) for copy in copies]).amax(0)
    distance = torch.full_like(scale, torch.inf)
    for first, second in combinations(copies, 2):
        distance = distance.minimum((first - second).abs_().amax(1))
    return scale, torch.where(scale > 0, distance / scale.clamp_min(TINY), 0.0)


def _rank_gain(copies: list[Tensor]) -> float | None:
    """Effective rank of the gradient less that of equal copies; None for large matrices.

    Roy and Vetterli, "The effective rank", EUSIPCO 2007: exp of the entropy of singular values.
    """
    if min(sum(len(copy) for copy in copies), copies[0].shape[1]) > MOST_RANK:
        return None

    def effective_rank(matrix: Tensor) -> float:
        values = torch.linalg.svdvals(matrix)
        share = values / values.sum().clamp_min(TINY)
        return float(torch.exp(torch.special.entr(share).sum()))

    return effective_rank(torch.cat(copies)) - effective_rank(torch.stack(copies).mean(0))
