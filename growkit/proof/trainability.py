"""Can the new capacity train? Copies that receive equal gradients stay equal for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from growkit.plan import Plan
from growkit.proof import Trainability

LONGEST = 128
"""Tokens of the text that the backward pass sees."""

EQUAL = 1e-9
"""Relative difference below which two gradients in float64 are the same but for rounding."""


AT_ONCE = 1 << 20
"""Elements of a gradient that are compared at a time."""

Named = tuple[str, Tensor]


class Gradients:
    """Looks at the gradients of copies, one tensor at a time.

    Args:
        plans: all plans; the copies are those of the last growth.
        last: index of that plan.
        as_stored: from the name of a parameter and its gradient to those of a tensor in the files.
    """

    def __init__(
        self, plans: Sequence[Plan], last: int, as_stored: Callable[[str, Tensor], Named]
    ) -> None:
        self._later = plans[last + 1 :]
        self._rules = {rule.target: rule for rule in plans[last].rules}
        self._as_stored = as_stored
        self._count = _Count()

    @classmethod
    def of(
        cls, plans: Sequence[Plan], as_stored: Callable[[str, Tensor], Named]
    ) -> Gradients | None:
        """For the last growth among these plans; None if there is none."""
        growths = [index for index, plan in enumerate(plans) if plan.copies]
        return cls(plans, growths[-1], as_stored) if growths else None

    def look(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a parameter into account."""
        grown = self._as_grown(*self._as_stored(name, gradient))
        rule = self._rules.get(grown[0]) if grown else None
        if grown and rule and rule.copies:
            _compare(grown[0], rule.copies(grown[1]), self._count)

    def found(self) -> Trainability:
        """How many rows have copies, and of how many of them two copies get the same gradient."""
        return Trainability(
            copied=self._count.copied,
            identical_gradients=self._count.stuck,
            without_gradient=self._count.without,
            first_identical=self._count.first,
        )

    def _as_grown(self, name: str, gradient: Tensor) -> Named | None:
        """As the growth left it: what came after it is undone; None for what is no tensor of it."""
        for plan in reversed(self._later):
            rule = plan.rule(name)
            back = rule.collapse(gradient) if rule.collapse else None
            if back is None:
                return None
            name, gradient = rule.sources[0], back
        return name, gradient


@dataclass
class _Count:
    copied: int = 0
    stuck: int = 0
    without: int = 0
    first: str | None = None


def _compare(name: str, groups: Iterator[list[Tensor]], count: _Count) -> None:
    for copies in groups:
        # A copy is a view of the whole gradient, and some rows of it at a time are looked at.
        parts = zip(*(copy.split(max(1, AT_ONCE // copy.shape[1])) for copy in copies), strict=True)
        scales, equal = zip(*(_stuck(part) for part in parts), strict=True)
        scale, stuck = torch.cat(scales), torch.cat(equal)
        count.copied += len(scale)
        count.stuck += int(stuck.sum())
        count.without += int((scale == 0).sum())
        if bool(stuck.any()) and count.first is None:
            count.first = name


def _stuck(copies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The size of every row's gradient, and whether two copies of it get the same."""
    scale = torch.stack([copy.abs().amax(1) for copy in copies]).amax(0)
    stuck = torch.zeros_like(scale, dtype=torch.bool)
    for first, second in combinations(copies, 2):
        stuck |= (first - second).abs_().amax(1) <= EQUAL * scale
    return scale, stuck & (scale > 0)
