"""From lines to what is said of them: spread over seeds, and the compute to a loss.

Everything is paired by seed where two arms are compared: weights of the source, the order of the
text and held-out windows are the same, so that what they have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from benchmarks.continual.campaign import Found, best_rate
from benchmarks.continual.experiment import Experiment
from benchmarks.continual.results import Line

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""The quantiles of Student's t for 95 % confidence, by degrees of freedom."""


@dataclass(frozen=True)
class Spread:
    """Values of seeds.

    Attributes:
        values: one for each seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of all."""
        return fmean(self.values)

    @property
    def margin(self) -> float | None:
        """Half of the interval that holds the mean with 95 % confidence; None for one value."""
        count = len(self.values)
        if count < 2:
            return None
        return STUDENT.get(count - 1, 1.96) * stdev(self.values) / math.sqrt(count)


@dataclass(frozen=True)
class Curve:
    """An arm with a seed: losses where the rate has decayed, by what they took.

    Attributes:
        tokens: trained on, without the source's.
        flops: computed, without the source's.
        test: nats per token.
        at: shares of the extra compute.
        before: FLOPs of the source that it began with.
    """

    tokens: tuple[float, ...]
    flops: tuple[float, ...]
    test: tuple[float, ...]
    at: tuple[Any, ...]
    before: float

    def reaching(self, loss: float, by: Sequence[float]) -> tuple[str, float]:
        """What it takes to a loss, in a straight line over the logarithm between two points.

        Args:
            loss: to reach.
            by: tokens or FLOPs of the points.

        Returns:
            ``=`` and how much; ``<`` and the least that was tried; ``>`` and the most.
        """
        if self.test[0] <= loss:
            return ("=" if self.test[0] == loss else "<"), by[0]
        for number in range(1, len(by)):
            high, low = self.test[number - 1], self.test[number]
            if low == loss:
                return "=", by[number]
            if low < loss:
                share = (high - loss) / (high - low)
                first, last = math.log(by[number - 1]), math.log(by[number])
                return "=", math.exp(first + share * (last - first))
        return ">", by[-1]


def curve_of(line: Line) -> Curve:
    """The points of a line."""
    points = line["points"]
    return Curve(
        tuple(each["tokens"] for each in points),
        tuple(each["flops"] for each in points),
        tuple(each["test"] for each in points),
        tuple(each["at"] for each in points),
        line["before_flops"],
    )


@dataclass(frozen=True)
class Outcome:
    """What became of an arm.

    Attributes:
        name: of the arm.
        rate: that was best.
        at_edge: whether a rate beyond those that were tried might be better.
        tried: validation loss at the last point by rate; None where it diverged.
        lines: by seed, at the best rate.
    """

    name: str
    rate: float
    at_edge: bool
    tried: Mapping[float, float | None]
    lines: Mapping[int, Line]

    @property
    def curves(self) -> dict[int, Curve]:
        """By seed."""
        return {seed: curve_of(line) for seed, line in self.lines.items()}

    @property
    def shares(self) -> tuple[Any, ...]:
        """Its points, in shares of the extra compute."""
        return next(iter(self.curves.values())).at

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
            if point["at"] == share
        }


def outcomes(experiment: Experiment, found: Found) -> dict[str, Outcome]:
    """Of all sources and arms whose rates were tried."""
    made = {}
    for name in (*experiment.sources, *experiment.arms):
        rate = best_rate(experiment, found, name)
        if rate is None:
            continue
        rates, first = experiment.learning_rates, experiment.seeds[0]
        tried = {}
        for each in rates:
            line = found[name, first, each]
            sound = "diverged" not in line
            tried[each] = line["points"][-1]["validation"] if sound else None
        keys = [(seed, (name, seed, rate)) for seed in experiment.seeds]
        lines = {
            seed: found[key] for seed, key in keys if key in found and "diverged" not in found[key]
        }
        at_edge = len(rates) > 1 and rate in (min(rates), max(rates))
        made[name] = Outcome(name, rate, at_edge, tried, lines)
    return made


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> Spread | None:
    """How far one is above the other, by seeds that both have; None without any."""
    common = [seed for seed in one if seed in other]
    return Spread(tuple(one[seed] - other[seed] for seed in common)) if common else None


@dataclass(frozen=True)
class Judged:
    """What became of a claim.

    Attributes:
        says: the claim, with where it is said.
        of: what was measured.
        found: how far what is said to be better is above the other; None without runs of both.
        more: whether more is better.
    """

    says: str
    of: str
    found: Spread | None
    more: bool

    @property
    def verdict(self) -> str:
        """Whether it appears."""
        if self.found is None:
            return "not run"
        if self.found.margin is None:
            return "one seed says nothing"
        if not any(self.found.values):
            return "no difference at all"
        if abs(self.found.mean) <= self.found.margin:
            return "noise"
        return "yes" if (self.found.mean > 0) == self.more else "no, the other way round"


def judged(experiment: Experiment, made: Mapping[str, Outcome]) -> list[Judged]:
    """All claims of an experiment."""
    all_of_them = []
    for claim in experiment.claims:
        one, other = made.get(claim["better"]), made.get(claim["than"])
        of, found = claim.get("of", "test"), None
        if one and other:
            at = claim.get("at", 1)
            found = differences(one.at(at, of), other.at(claim.get("against", at), of))
        more = claim.get("more", False)
        all_of_them.append(Judged(claim["says"], of, found, more))
    return all_of_them


@dataclass(frozen=True)
class Reached:
    """What arms take to a loss, by seed.

    Attributes:
        signs: ``=``, ``<`` or ``>`` (it was not reached), by seed.
        tokens: extra ones.
        flops: extra ones.
        total: FLOPs with those of the source.
        saved: logarithms of FLOPs of the baseline over extra FLOPs.
        saved_total: the same, both with those of the sources.
    """

    signs: tuple[str, ...]
    tokens: tuple[float, ...]
    flops: tuple[float, ...]
    total: tuple[float, ...]
    saved: Spread
    saved_total: Spread


def reached(arm: Outcome, baseline: Outcome, share: Any) -> Reached | None:
    """What an arm takes to the baseline's loss at a point, seed by seed.

    Args:
        arm: which.
        baseline: whose loss is to be reached.
        share: the baseline's point.

    Returns:
        None if no seed has both.
    """
    goals = baseline.at(share)
    seeds = [seed for seed in arm.lines if seed in goals]
    if not seeds:
        return None
    signs, tokens, flops, total, saved, saved_total = [], [], [], [], [], []
    for seed in seeds:
        curve, base = arm.curves[seed], baseline.curves[seed]
        sign, needed = curve.reaching(goals[seed], curve.flops)
        spent = base.flops[base.at.index(share)]
        signs.append(sign)
        tokens.append(curve.reaching(goals[seed], curve.tokens)[1])
        flops.append(needed)
        total.append(needed + curve.before)
        saved.append(math.log(spent / needed))
        saved_total.append(math.log((spent + base.before) / (needed + curve.before)))
    return Reached(
        tuple(signs),
        tuple(tokens),
        tuple(flops),
        tuple(total),
        Spread(tuple(saved)),
        Spread(tuple(saved_total)),
    )
