"""The law of updates of a whole plan: how each of its tensors is updated, and where that ends.

It holds as long as the gradients of copies are equal, and nothing trains that the source does not
have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growkit.planning.plan import RECOMPUTED
from growkit.planning.update import Update

if TYPE_CHECKING:
    from growkit.planning.lineage import Lineage
    from growkit.planning.plan import Plan

APART = "what is made of one tensor becomes several, which train apart"


@dataclass(frozen=True)
class Law:
    """How a whole target is to be updated.

    Attributes:
        updates: of every tensor.
        why: what keeps the target's training from being the source's, a phrase for each, which
            has the number of tensors and the first of them where it is of some; empty if it is the
            same but for what is new.
    """

    updates: Mapping[str, Update]
    why: tuple[str, ...]

    @property
    def new(self) -> list[str]:
        """Tensors that nothing of the source trains like."""
        return [name for name, each in self.updates.items() if each.new]


def law_of(lineage: Lineage) -> Law:
    """The law for what the steps of a lineage make."""
    current = {name: Update() for name in lineage.source.tensors}
    reasons: dict[str, None] = {}
    for plan in lineage.plans:
        made = stepped(plan, current)
        reasons |= dict.fromkeys(filter(None, [plan.apart, _left_out(plan)]))
        current = made
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
    """The updates of what a plan makes.

    Args:
        plan: of one step.
        before: the updates of its sources.
    """
    found = {
        rule.target: rule.transform.update([before[name] for name in rule.sources])
        for rule in plan.rules
    }
    rules = [rule for rule in plan.rules if not found[rule.target].new]
    uses = Counter(name for rule in rules for name in rule.sources)
    for rule in rules:
        for name in rule.sources:
            if uses[name] > rule.transform.among:
                found[rule.target] = found[rule.target].because(APART)
    return found


def _left_out(plan: Plan) -> str:
    """What the source trains, and the target does not have."""
    names = [
        name
        for name, why in plan.dropped.items()
        if name not in plan.duplicates and why != RECOMPUTED
    ]
    return f"{names[0]} of the source is left out" if names else ""
