"""From lines to findings: differences with their spread over seeds, claims, the compute to a loss.

Arms are compared seed by seed: weights of the source, the order of the text and held-out windows
are the same, so that what they have in common cancels. Intervals are those of a probe
(``growkit.extras.probing.ranking``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.continual.campaign import Found, best_rate, tried
from benchmarks.continual.experiment import Experiment
from growkit.extras.probing.json_lines import Line
from growkit.extras.probing.ranking import paired_difference
from growkit.report.drawing import Interval


def interval(values: Sequence[float], name: str = "") -> Interval:
    """The mean of values of seeds with its 95 % interval; of one value, that value and noise."""
    found = paired_difference([[value] for value in values])
    ends = (found.low, found.high) if len(values) > 1 else (values[0], values[0])
    return Interval(name, found.difference, *ends, values, found.noise)


@dataclass(frozen=True)
class Outcome:
    """What became of an arm.

    Attributes:
        name: of the arm.
        rate: that was best.
        at_edge: whether a rate beyond those that were tried might be better.
        tried: validation loss at the last point by rate; infinite where it diverged.
        lines: by seed, at the best rate.
    """

    name: str
    rate: float
    at_edge: bool
    tried: Mapping[float, float]
    lines: Mapping[int, Line]

    @property
    def shares(self) -> list[Any]:
        """Its points, in shares of the extra compute."""
        return [point["at"] for point in next(iter(self.lines.values()))["points"]]

    @property
    def last(self) -> Any:
        """The last point that is not the one of the total compute."""
        return [share for share in self.shares if share != "total"][-1]

    def at(self, share: Any, of: str = "test") -> dict[int, float]:
        """What was measured at a point, by seed; empty without such a point.

        Args:
            share: of the extra compute, or ``total``.
            of: what; the test loss, or one of the experiment's measures.
        """
        return {
            seed: point[of]
            for seed, line in self.lines.items()
            for point in line["points"]
            if point["at"] == share and of in point
        }


def outcomes(experiment: Experiment, found: Found) -> dict[str, Outcome]:
    """Of all sources and arms whose rates were tried."""
    made, rates = {}, experiment.learning_rates
    for name in (*experiment.sources, *experiment.arms):
        rate = best_rate(experiment, found, name)
        if rate is None:
            continue
        lines = {seed: found.get((name, seed, rate)) for seed in experiment.seeds}
        sound = {seed: line for seed, line in lines.items() if line and "diverged" not in line}
        at_edge = len(rates) > 1 and rate in (min(rates), max(rates))
        made[name] = Outcome(name, rate, at_edge, tried(experiment, found, name), sound)
    return made


def differences(
    one: Mapping[int, float], other: Mapping[int, float], name: str = ""
) -> Interval | None:
    """How far one is above the other, by seeds that both have; None without any."""
    found = [one[seed] - other[seed] for seed in one if seed in other]
    return interval(found, name) if found else None


REVERSED = "no, the other way round"
"""The verdict on a claim whose opposite appears."""


@dataclass(frozen=True)
class Judged:
    """What became of a claim.

    Attributes:
        says: the claim, with its source.
        of: what was measured.
        found: how far the arm that is claimed to be better is above the other; None without runs
            of both.
        more: whether more is better.
    """

    says: str
    of: str
    found: Interval | None
    more: bool

    @property
    def verdict(self) -> str:
        """Whether it appears."""
        if self.found is None:
            return "not run"
        if len(self.found.each) == 1:
            return "one seed says nothing"
        if not any(self.found.each):
            return "no difference at all"
        if self.found.noise:
            return "noise"
        return "yes" if (self.found.mean > 0) == self.more else REVERSED


def judged(experiment: Experiment, made: Mapping[str, Outcome]) -> list[Judged]:
    """All claims of an experiment."""
    every = []
    for claim in experiment.claims:
        one, other = made.get(claim["better"]), made.get(claim["than"])
        of, found = claim.get("of", "test"), None
        if one and other:
            at = claim.get("at", 1)
            found = differences(one.at(at, of), other.at(claim.get("against", at), of))
        every.append(Judged(claim["says"], of, found, claim.get("more", False)))
    return every


def reaching(points: Sequence[Mapping[str, Any]], loss: float, by: str) -> tuple[str, float]:
    """What it takes to a test loss, in a straight line over the logarithm between two points.

    Args:
        points: of a line.
        loss: to reach.
        by: ``tokens`` or ``flops``.

    Returns:
        ``=`` and how much; ``<`` and the least that was tried; ``>`` and the most.
    """
    if points[0]["test"] <= loss:
        return ("=" if points[0]["test"] == loss else "<"), points[0][by]
    for before, after in pairwise(points):
        if after["test"] <= loss:
            share = (before["test"] - loss) / (before["test"] - after["test"])
            return "=", before[by] * math.exp(share * math.log(after[by] / before[by]))
    return ">", points[-1][by]


@dataclass(frozen=True)
class Reached:
    """What a seed of an arm takes to a loss.

    Attributes:
        sign: ``=``, ``<`` or ``>`` (it was not reached).
        tokens: extra ones.
        flops: extra ones.
        total: FLOPs with those of the source.
        saved: logarithm of the baseline's extra FLOPs over its own.
        saved_total: the same with those of the sources.
    """

    sign: str
    tokens: float
    flops: float
    total: float
    saved: float
    saved_total: float


def reached(arm: Outcome, baseline: Outcome, share: Any) -> list[Reached]:
    """What an arm takes to the baseline's loss at a point, seed by seed.

    Args:
        arm: which.
        baseline: whose loss is to be reached.
        share: the baseline's point.
    """
    found = []
    for seed, goal in baseline.at(share).items():
        if seed not in arm.lines:
            continue
        line, base = arm.lines[seed], baseline.lines[seed]
        sign, flops = reaching(line["points"], goal, "flops")
        tokens = reaching(line["points"], goal, "tokens")[1]
        spent = next(each["flops"] for each in base["points"] if each["at"] == share)
        total, base_total = flops + line["before_flops"], spent + base["before_flops"]
        saved = math.log(spent / flops), math.log(base_total / total)
        found.append(Reached(sign, tokens, flops, total, *saved))
    return found
