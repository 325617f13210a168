"""Lineage: which tensors of a source every tensor of a target came from, through which steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from growkit.base.tensors import Weights
from growkit.planning.plan import Plan, Planned, Rule
from growkit.planning.transforms import Kept, Mapped, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import Index
    from growkit.algebra.law import Rows


class LostError(Exception):
    """A tensor does not give back what it was made from."""


@dataclass(frozen=True)
class Places:
    """Where the coordinates of one dimension of a tensor come from.

    Attributes:
        tensor: the name of the one that they come from.
        source: for each coordinate the one that it copies, or ``NOTHING``; None for the same.
        factor: what the tensor is multiplied by.
    """

    tensor: str
    source: Index | None = None
    factor: float = 1.0


def traced(
    plans: Sequence[Plan], name: str, dimension: int, behind: Places | None = None
) -> Places | None:
    """Where the coordinates of a dimension come from, through all steps.

    Args:
        plans: of the steps, in order.
        name: of a tensor that the last one makes.
        dimension: of the tensor.
        behind: what became of that tensor.

    Returns:
        None if some of it was computed, or is new.
    """
    import numpy as np

    from growkit.algebra.expansion import NOTHING

    source, factor = (behind.source, behind.factor) if behind else (None, 1.0)
    for plan in reversed(plans):
        rule = plan.by_target.get(name)
        if rule is None or not isinstance(rule.transform, Kept | Mapped):
            return None
        if isinstance(rule.transform, Mapped):
            here = rule.transform.maps[dimension].source
            source = here if source is None else np.where(source == NOTHING, NOTHING, here[source])
        factor *= rule.transform.factor
        name = rule.transform.source
    return Places(name, source, factor)


@dataclass(frozen=True, eq=False)
class Lineage:
    """All steps from a source to a target.

    Attributes:
        source: what the first plan was made for.
        plans: of all steps, in order.
        promise: the weakest of what the steps promise of the function.
        lost: what is lost, in one line; empty if nothing is.
        by_rounding: whether nothing is lost but by rounding.
    """

    source: Weights
    plans: Sequence[Plan]
    promise: str = "exact"
    lost: str = ""
    by_rounding: bool = field(default=False, kw_only=True)

    @cached_property
    def stages(self) -> tuple[Weights, ...]:
        """The source, and what every step makes, computed when it is read."""
        stages = [self.source]
        for plan in self.plans:
            stages.append(Planned(stages[-1], plan))
        return tuple(stages)

    @property
    def target(self) -> Weights:
        """What the last step makes."""
        return self.stages[-1]

    @cached_property
    def layers(self) -> tuple[int | None, ...] | None:
        """Which layers of the source those of the target compute; see ``Plan.layers``."""
        found: tuple[int | None, ...] | None = None
        for plan in self.plans:
            if plan.layers is not None and found is not None:
                before = found
                found = tuple(None if each is None else before[each] for each in plan.layers)
            else:
                found = plan.layers or found
        return found

    def check_duplicates(self) -> None:
        """Compare tensors that must be equal, in every step.

        Raises:
            InputError: one differs.
        """
        for stage in self.stages[1:]:
            assert isinstance(stage, Planned)
            stage.check_duplicates(stage.plan.duplicates.values())

    def steps(self, target: str) -> list[list[Rule]]:
        """The rules on the way to a tensor, the last step first."""
        names, found = {target: None}, []  # a dictionary keeps its order
        for plan in reversed(self.plans):
            rules = [plan.by_target[name] for name in names]
            found.append(rules)
            names = {name: None for rule in rules for name in rule.sources}
        return found

    def origin(self, target: str) -> str | None:
        """The source's tensor that a tensor holds; None if it holds none."""
        for plan in reversed(self.plans):
            rule = plan.by_target[target]
            if not rule.transform.holds:
                return None
            (target,) = rule.sources
        return target

    def repeatable(self, target: str) -> bool:
        """Whether everything on the way to a tensor gives the same bits when computed again."""
        return all(rule.transform.repeatable for rules in self.steps(target) for rule in rules)

    def recovered(self, written: Weights, target: str) -> Rows:
        """Rows of the source's tensor that a tensor holds, read out of the written one.

        Args:
            written: a checkpoint of the target.
            target: name of a tensor.

        Returns:
            A function of rows, which raises ``LostError`` where they are lost.

        Raises:
            LostError: the tensor holds nothing of a source.
        """
        rows: Rows = partial(written.read, target)
        for plan in reversed(self.plans):
            rule = plan.by_target[target]
            if not rule.transform.holds:
                raise LostError
            rows, (target,) = partial(_undo, rule.transform, rows), rule.sources
        return rows


def _undo(transform: Transform, rows: Rows, of: slice) -> Tensor:
    back = transform.undo(rows, of)
    if back is None:
        raise LostError
    return back
