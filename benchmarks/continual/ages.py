"""Leads over training on, by the age of the source, and the age from which on there is one.

The age is the number of tokens for each parameter that the source was trained with. A lead is the
test loss of the source trained on minus that of an arm with as much extra compute, seed by seed.
Between two ages, leads are taken to be linear in the logarithm of the age.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

from benchmarks.continual import tables
from benchmarks.continual.analysis import Outcome, interval
from benchmarks.continual.experiment import Experiment
from growkit.report.drawing import Curve

Leads = Mapping[float, Mapping[int, float]]
"""Nats per token by age, then by seed."""


def ways(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Names of arms by what they do, then by source; of arms that several sources have."""
    found: dict[str, dict[str, str]] = {}
    for name, arm in experiment.arms.items():
        way, _, source = name.rpartition(", ")
        if source == arm.source:
            found.setdefault(way, {})[source] = name
    return found


def leads(
    experiment: Experiment, made: Mapping[str, Outcome], way: str, share: float
) -> dict[float, dict[int, float]]:
    """The leads of a way over the baseline's.

    Args:
        experiment: with sources of one shape.
        made: outcomes of its sources and arms.
        way: what the arms do.
        share: of the extra compute.
    """
    every, found = ways(experiment), {}
    baseline = every[experiment.baseline.rpartition(", ")[0]]
    for source, name in every[way].items():
        if name not in made or baseline[source] not in made:
            continue
        others, own = made[baseline[source]].at(share), made[name].at(share)
        parameters = next(iter(made[source].lines.values()))["parameters"]
        age = experiment.source_tokens(source) / parameters
        by_seed = {seed: others[seed] - loss for seed, loss in own.items() if seed in others}
        if by_seed:
            found[age] = by_seed
    return found


def crossings(found: Leads) -> list[tuple[str, float]]:
    """For every seed, the logarithm of the age from which on its lead is above zero.

    Returns:
        ``=`` and the logarithm; ``<`` and that of the least age, whose lead is above zero already;
        or ``>`` and that of the greatest, whose lead is not.
    """
    crossed = []
    seeds = set.intersection(*(set(each) for each in found.values()))
    for seed in sorted(seeds):
        points = [(math.log(age), by_seed[seed]) for age, by_seed in sorted(found.items())]
        sign, at = (">", points[-1][0]) if points[-1][1] <= 0 else ("<", points[0][0])
        for (before, low), (after, high) in pairwise(points):
            if low <= 0 < high:  # the last one, if there are several
                sign, at = "=", before + (after - before) * low / (low - high)
        crossed.append((sign, at))
    return crossed


def crossing(found: Leads) -> str:
    """The age from which on there is a lead, with its 95 % interval over seeds."""
    crossed = crossings(found)
    signs, values = [sign for sign, _ in crossed], [value for _, value in crossed]
    if set(signs) == {"="}:
        mean = interval(values)
        shown = [f"{math.exp(each):.0f}" for each in (mean.mean, mean.low, mean.high)]
        return f"{shown[0]} ({shown[1]} to {shown[2]})"
    each = [f"{sign} {math.exp(value):.0f}".removeprefix("= ") for sign, value in crossed]
    return each[0] if len({*each}) == 1 else ", ".join(each)


def table(experiment: Experiment, made: Mapping[str, Outcome]) -> str:
    """Leads of all ways at all ages and budgets."""
    baseline, rows = experiment.baseline.rpartition(", ")[0], []
    ages: dict[float, None] = {}
    for way in ways(experiment):
        shares = () if way == baseline else experiment.arms[experiment.baseline].points
        for share in shares:
            found = leads(experiment, made, way, float(share))
            if found:
                ages |= dict.fromkeys(found)
                rows.append((way, tables.budget(share, experiment.scale.extra), found))
    lines = [
        [way, budget]
        + [tables.signed(interval([*found[age].values()])) if age in found else "" for age in ages]
        + [crossing(found)]
        for way, budget, found in rows
    ]
    head = ["", "extra compute", *(f"{age:.0f}" for age in ages), "ahead from"]
    return (
        f"Lead over “{baseline}” at equal extra compute (in multiples of the source's), by tokens "
        "for each parameter of the source, and the number of these from which on there is one:\n\n"
    ) + tables.table(head, lines)


def drawn(experiment: Experiment, made: Mapping[str, Outcome], share: float) -> Iterator[Curve]:
    """Leads by the binary logarithm of the age, a curve for each way."""
    baseline = experiment.baseline.rpartition(", ")[0]
    for way in ways(experiment):
        found = leads(experiment, made, way, share) if way != baseline else {}
        seeds = {seed for by_seed in found.values() for seed in by_seed}
        curves = [
            [(math.log2(age), by_seed[seed]) for age, by_seed in found.items() if seed in by_seed]
            for seed in sorted(seeds)
        ]
        if curves:
            yield Curve(way, curves)
