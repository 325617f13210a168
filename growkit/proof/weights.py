"""The algebra half of the proof: the target's weights give the source's weights back.

Prompts never touch most rows of an embedding, and a change in a row that no prompt touches changes
no logit. Collapsing the written tensors (W = L W' E) looks at every element of every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from growkit.base.tensors import TensorInfo, Weights, parts
from growkit.planning.lineage import Lineage, LostError
from growkit.planning.plan import Plan, Rule
from growkit.proof.findings import Recovered
from growkit.results.proof import Spectrum

AT_A_TIME = 2
"""Tensors: files are read by one thread while another one computes."""

WORD = 8
"""Bytes that are compared at a time, where nothing is left over."""


def compare_weights(lineage: Lineage, target: Weights) -> Recovered:
    """Hold every tensor that was written against what it should be.

    Args:
        lineage: how it was made.
        target: what was written.
    """
    source, plans = lineage.source, lineage.plans
    lost = _first_lost(lineage, target)
    if lost:
        return Recovered(lost=lost)
    spectra: list[Spectrum] = []
    unchecked: list[str] = []
    for index, plan in enumerate(plans):
        if not plan.checks:
            continue
        earlier, later = Lineage(source, plans[:index]), Lineage(target, plans[index + 1 :])
        written = _written(plan, later.plans)
        for check in plan.checks:
            if not (
                all(name in written for name in check.targets)
                and all(earlier.repeatable(name) for name in check.sources)
            ):
                unchecked += check.targets
                continue
            targets = []
            for name in check.targets:
                recovered = _recovered(target, written[name], plan.by_target[name].info, later)
                if recovered is None:
                    return Recovered(lost=written[name][0], spectra=spectra)
                targets.append(recovered)
            judged = check.judge([earlier.target.read(name) for name in check.sources], targets)
            if judged.spectrum:
                spectra.append(judged.spectrum)
            if not judged.kept:
                return Recovered(lost=written[check.targets[0]][0], spectra=spectra)
    wanted = source.tensors.keys() - plans[0].dropped.keys()
    found = wanted & {lineage.origin(rule.target) for rule in plans[-1].rules}
    return Recovered(
        recomputed_sources=sum(len(plan.recomputed_sources) for plan in plans),
        spectra=spectra,
        unchecked=unchecked,
        recovered=(len(found), len(wanted)),
    )


def _written(plan: Plan, later: Sequence[Plan]) -> dict[str, list[str]]:
    """For targets of a plan, the tensors from which later plans give them back."""
    names = {rule.target: [rule.target] for rule in plan.rules}
    for step in later:
        became: dict[str, list[str]] = {}
        for rule in step.rules:
            if rule.transform.holds:
                became.setdefault(rule.sources[0], []).append(rule.target)
        names = {
            name: [target for each in now for target in became.get(each, ())]
            for name, now in names.items()
        }
    return {name: now for name, now in names.items() if now}


def _recovered(
    target: Weights, names: Sequence[str], info: TensorInfo, later: Lineage
) -> Tensor | None:
    """The tensor that all of these give back; None if they do not."""
    found: Tensor | None = None
    for name in names:
        try:
            back = later.recovered(target, name)(slice(0, info.shape[0]))
        except LostError:
            return None
        if not (found is None or back.equal(found)):
            return None
        found = back
    return found


def _first_lost(lineage: Lineage, target: Weights) -> str | None:
    """The first tensor that does not follow its rule, is one too many, or is not given back."""
    rules = lineage.plans[-1].rules
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            found = pool.map(partial(_sound, lineage, target), rules)
            for rule, sound in zip(rules, found, strict=True):
                if not sound:
                    return rule.target
        finally:
            pool.shutdown(cancel_futures=True)
    recovered = {lineage.origin(rule.target) for rule in rules}
    expected = {rule.target for rule in rules}
    wanted = lineage.source.tensors.keys() - lineage.plans[0].dropped.keys()
    wanted -= _recomputed_sources(lineage.plans)
    return min((target.tensors.keys() - expected) | (wanted - recovered), default=None)


def _sound(lineage: Lineage, target: Weights, rule: Rule) -> bool:
    """Whether the written tensor follows its rule."""
    name, source = rule.target, lineage.source
    if target.tensors.get(name) != rule.info:
        return False
    origin = lineage.origin(name)
    if origin is None:
        # Computed, not arranged: nothing comes back, but computing it again must give it.
        return not lineage.repeatable(name) or _same(lineage.target.read(name), target.read(name))
    recovered = lineage.recovered(target, name)
    pieces = parts(source, origin, rule.info.elements)  # large tensors part by part
    try:
        return all(_same(recovered(rows), source.read(origin, rows)) for rows in pieces)
    except LostError:
        return False


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype == other.dtype and one.nbytes == other.nbytes and not one.nbytes % WORD:
        # Many times as fast; numbers that are not NaN are the same if their bits are.
        words = (each.contiguous().flatten().view(torch.int64) for each in (one, other))
        if one.shape == other.shape and torch.equal(*words):
            return True
    if one.element_size() == 1:  # torch does not compare float8
        one, other = one.float(), other.float()
    return one.equal(other)


def _recomputed_sources(plans: Sequence[Plan]) -> set[str]:
    """The source's tensors that no tensor gives back, because they are recomputed or dropped."""
    names: set[str] = set()
    for plan in reversed(plans):
        made = {rule.target: rule.sources for rule in plan.rules}
        names = {source for name in names for source in made.get(name, ())}
        names |= plan.recomputed_sources.keys() | plan.dropped.keys()
    return names
