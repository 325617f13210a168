"""The algebra half of the proof: the target's weights give the source's weights back.

Prompts never touch most rows of an embedding, and a change in a row that no prompt touches changes
no logit. Collapsing the written tensors (W = L W' E) looks at every element of every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from growkit.checkpoint import Weights, parts
from growkit.plan import Plan, Planned
from growkit.proof import Spectrum


@dataclass(frozen=True)
class Compared:
    """What a comparison of weights found.

    Attributes:
        lost: the name of a tensor of the target that does not give its source back, bit for bit,
            or of one that a check refuses or that should not be there, or of a tensor of the
            source that no tensor gives back; None if nothing is lost.
        spectra: of the projections that checks looked at, up to the first that is refused.
        unchecked: tensors that no check could look at, because what is left of them was computed
            once more, or they were made from what others compute with other bits.
    """

    lost: str | None
    spectra: tuple[Spectrum, ...] = ()
    unchecked: tuple[str, ...] = ()


def compare_weights(source: Weights, target: Weights, plans: Sequence[Plan]) -> Compared:
    """Hold every tensor that was written against what it should be.

    Args:
        source: what the first plan was made for.
        target: what was written.
        plans: all steps from one to the other.
    """
    lost = _first_lost(source, target, plans)
    if lost:
        return Compared(lost)
    spectra: list[Spectrum] = []
    unchecked: list[str] = []
    planned: Weights = source
    for index, plan in enumerate(plans):
        later = plans[index + 1 :]
        written = _written(plan, later)
        for check in plan.checks:
            if not (
                all(name in written for name in check.targets)
                and all(_repeatable(name, plans[:index]) for name in check.sources)
            ):
                unchecked += check.targets
                continue
            targets = []
            for name in check.targets:
                recovered = _recovered(target, written[name], later)
                if recovered is None:
                    return Compared(written[name][0], tuple(spectra))
                targets.append(recovered)
            judged = check.judge([planned.read(name) for name in check.sources], targets)
            if judged.spectrum:
                spectra.append(judged.spectrum)
            if not judged.kept:
                return Compared(written[check.targets[0]][0], tuple(spectra))
        planned = Planned(planned, plan)
    return Compared(None, tuple(spectra), tuple(unchecked))


def _written(plan: Plan, later: Sequence[Plan]) -> dict[str, list[str]]:
    """For targets of a plan, the tensors from which later plans give them back."""
    names = {rule.target: [rule.target] for rule in plan.rules}
    for step in later:
        became: dict[str, list[str]] = {}
        for rule in step.rules:
            if rule.collapse:
                became.setdefault(rule.sources[0], []).append(rule.target)
        names = {
            name: [target for each in now for target in became.get(each, ())]
            for name, now in names.items()
        }
    return {name: now for name, now in names.items() if now}


def _recovered(target: Weights, names: Sequence[str], later: Sequence[Plan]) -> Tensor | None:
    """The tensor that all of these give back; None if they do not."""
    found: Tensor | None = None
    for name in names:
        back = _collapse(target.read(name), name, later)
        if back is None or not (found is None or back.equal(found)):
            return None
        found = back
    return found


def _first_lost(source: Weights, target: Weights, plans: Sequence[Plan]) -> str | None:
    recovered = set()
    planned: Weights = source
    for plan in plans:
        planned = Planned(planned, plan)
    for written in plans[-1].rules:
        if target.tensors.get(written.target) != written.info:
            return written.target
        origin = _origin_of(written.target, plans)
        if origin is None:
            # Computed, not arranged: nothing comes back, but computing it again must give it.
            repeatable = _repeatable(written.target, plans)
            again = planned.read(written.target) if repeatable else None
            if again is not None and not again.equal(target.read(written.target)):
                return written.target
            continue
        if not _gives_back(source, target, written.target, plans):
            return written.target
        recovered.add(origin)
    expected = {rule.target for rule in plans[-1].rules}
    wanted = source.tensors.keys() - plans[0].dropped.keys() - _kept_in_effect(plans)
    return min((target.tensors.keys() - expected) | (wanted - recovered), default=None)


def _kept_in_effect(plans: Sequence[Plan]) -> set[str]:
    """The source's tensors that no tensor gives back: others are computed from them, or none."""
    names: set[str] = set()
    for plan in reversed(plans):
        made = {rule.target: rule.sources for rule in plan.rules}
        names = {source for name in names for source in made.get(name, ())}
        names |= plan.in_effect.keys() | plan.dropped.keys()
    return names


def _repeatable(target: str, plans: Sequence[Plan]) -> bool:
    """Whether everything on the way to a tensor gives the same bits when computed again."""
    names = {target}
    for plan in reversed(plans):
        rules = [plan.rule(name) for name in names]
        if not all(rule.repeatable for rule in rules):
            return False
        names = {source for rule in rules for source in rule.sources}
    return True


def _gives_back(source: Weights, target: Weights, name: str, plans: Sequence[Plan]) -> bool:
    """Whether a tensor, or every part of one that is large, collapses to what it was made from."""
    origin = _origin_of(name, plans)
    assert origin is not None
    pieces: list[slice | None] = [None]
    if source.by_rows(origin) and _row_by_row(name, plans):
        pieces = [*parts(target, name)]
    for rows in pieces:
        back = _collapse(target.read(name, rows), name, plans)
        if back is None or not back.equal(source.read(origin, rows)):
            return False
    return True


def _origin_of(name: str, plans: Sequence[Plan]) -> str | None:
    """The source's tensor that a tensor holds, taken back through all steps; None if none."""
    for plan in reversed(plans):
        rule = plan.rule(name)
        if rule.collapse is None:
            return None
        name = rule.sources[0]
    return name


def _row_by_row(name: str, plans: Sequence[Plan]) -> bool:
    for plan in reversed(plans):
        rule = plan.rule(name)
        if not rule.row_by_row:
            return False
        name = rule.sources[0]
    return True


def _collapse(tensor: Tensor, name: str, plans: Sequence[Plan]) -> Tensor | None:
    """Take a tensor, or rows of it, back through all steps; None if what it was made from is lost.

    A tensor that holds nothing of the source gives nothing back either.
    """
    back: Tensor | None = tensor
    for plan in reversed(plans):
        rule = plan.rule(name)
        if rule.collapse is None or back is None:
            return None
        name, back = rule.sources[0], rule.collapse(back)
    return back
