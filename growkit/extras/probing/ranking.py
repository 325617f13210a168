"""Ranking by loss at equal compute, with a test of each difference against noise.

Two trainings with the same seed see the same batches and are measured on the same held-out windows,
so their losses are compared pair by pair. The mean difference is uncertain in two ways: losses vary
with the order of batches (spread over seeds) and with the held-out text (spread over windows). With
S seeds and W windows, the standard error of the mean of S · W differences is

    se² = s²_seeds / S + s²_windows / W

with the variances of the means of every seed, and of every window. Each contains a part of the
other, so the sum errs on the large side. It has (Satterthwaite, 1946)

    se⁴ / ((s²_seeds / S)² / (S - 1) + (s²_windows / W)² / (W - 1))

degrees of freedom, rounded down. A difference is more than noise if the interval of Student's t
("The probable error of a mean", 1908) around it excludes 0, and if it exceeds the rounding of
losses in float32. With m compared pairs, each interval has confidence 1 - 5 % / m, so that all hold
at once in 95 % of probes (Dunn, 1961). With several learning rates, each model is compared at its
best rate; the interval ignores this choice. If only means over windows are known, as in
``benchmarks/continual``, the spread over seeds alone is used.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np

from growkit.base.limits import within
from growkit.base.names import name_of
from growkit.extras.probing.harness import Look
from growkit.extras.probing.probe_settings import Candidate, ProbeSettings
from growkit.extras.probing.results import probe_result as results
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import with_paths
from growkit.results.proof_result import counted

FEW = 30
"""Fewest steps for a conclusion, even after a shorter warmup."""

CONFIDENCE = 0.95
"""Confidence of all intervals together."""

ROUNDING = 1e-5
"""Nats per token; larger than differences from another order of the same computation."""

RULE = (
    "A difference is noise unless the interval of Student's t around it leaves out 0 and it is "
    "more than rounding makes, 1e-5. "
    "Losses are paired by seed and by held-out window; the standard error adds the spreads over "
    "both (degrees of freedom: Satterthwaite 1946). Intervals of all pairs hold together with "
    "95 % (Dunn 1961)."
)


def paired_difference(
    differences: Sequence[Sequence[float]], pairs: int = 1
) -> results.PairedDifference:
    """Compute the confidence interval of a difference; unbounded for one seed and one window.

    Args:
        differences: differences of losses, [seeds][windows].
        pairs: number of differences that are compared at once.
    """
    spreads = []
    for groups in (differences, list(zip(*differences, strict=True))):
        means = [fmean(group) for group in groups]
        if len(means) > 1:
            spreads.append((variance(means) / len(means), len(means) - 1))
    mean, total = fmean(map(fmean, differences)), sum(square for square, _ in spreads)
    if total == 0:
        reach = 0.0 if spreads else math.inf
    else:
        free = total**2 / sum(square**2 / free for square, free in spreads)
        reach = t_beyond((1 - CONFIDENCE) / pairs, math.floor(free + 1e-9)) * math.sqrt(total)
    noise = abs(mean) <= reach or within(abs(mean), ROUNDING)
    return results.PairedDifference(
        difference=mean, low=mean - reach, high=mean + reach, noise=noise
    )


def t_beyond(probability: float, freedom: int) -> float:
    """The t that a variable of Student's distribution exceeds in size with a probability.

    Args:
        probability: between 0 and 1.
        freedom: degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while passed(high, freedom) > probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if passed(middle, freedom) > probability else (low, middle)
    return high


def passed(t: float, freedom: int) -> float:
    """The probability of a value beyond ±t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term, total = 1.0, 0.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (number - 1) / number
    if not odd:
        return 1 - math.sin(angle) * total
    return 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


@dataclass
class Arm:
    """The source or a candidate, with its measurements.

    Attributes:
        entry: its entry in the result, filled in step by step; the outcome starts as ``ranked``.
        candidate: the candidate; None for the source.
        stored: the model; None if it cannot be trained.
        runs: measurements of its trainings, by rate and seed.
    """

    entry: results.ProbeCandidate
    candidate: Candidate | None = None
    stored: Path | Checkpoint | None = None
    runs: dict[tuple[float, int], list[Look]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The arm's name in the journal; names of candidates begin with a number."""
        return self.candidate.folder if self.candidate else "source"

    @property
    def step_flops(self) -> int:
        """Floating-point operations of a step."""
        return self.entry.step_flops or 0

    def refuse(self, reason: str) -> None:
        """Mark the arm as one that cannot be grown or trained."""
        self.entry.outcome, self.entry.reason, self.entry.step_flops = "refused", reason, None
        self.stored, self.runs = None, {}

    def finite(self) -> dict[float, list[list[Look]]]:
        """The trainings of every seed, for rates with finite losses only."""
        by_rate: dict[float, list[list[Look]]] = {}
        for (rate, _), looks in self.runs.items():
            by_rate.setdefault(rate, []).append(looks)
        lost = {rate for (rate, _), looks in self.runs.items() if looks[-1].losses is None}
        return {rate: runs for rate, runs in by_rate.items() if rate not in lost}


def new_arm(name: str, candidate: Candidate | None = None) -> Arm:
    """Make an arm before its growth.

    Args:
        name: name in the result.
        candidate: the candidate; None for the source.
    """
    steps = with_paths(candidate.recipe.as_dict()["steps"], name_of) if candidate else []
    entry = results.ProbeCandidate(
        name=name,
        source=candidate is None,
        outcome="ranked",
        steps=[", ".join(f"{k} {v}" for k, v in step.items()) for step in steps],
        losses=[],
        by_lr=[],
        curves=[],
    )
    return Arm(entry, candidate)


def conclude(arms: Sequence[Arm], settings: ProbeSettings) -> dict[str, Any]:
    """Rank the arms, and compute their differences and the warnings about both.

    Args:
        arms: the source and the candidates.
        settings: settings of the training.

    Returns:
        The corresponding fields of a ``ProbeResult``.
    """
    ends = [arm.step_flops * runs[0][-1].step for arm in arms for runs in arm.finite().values()]
    equal = float(min(ends)) if ends else None
    trained = {
        arm.entry.name: _compare(arm, (equal or 0.0) / arm.step_flops) for arm in arms if arm.runs
    }
    order = sorted(
        (arm.entry for arm in arms),
        key=lambda candidate: (results.OUTCOMES.index(candidate.outcome), candidate.loss or 0.0),
    )
    for number, candidate in enumerate(order, 1):
        candidate.rank = number if candidate.outcome != "refused" else None
    early = [*_early(order, settings.warmup)]
    conclusion = {
        "equal_compute": equal,
        "early": bool(early),
        "candidates": order,
        "differences": differences_of({name: losses for name, losses in trained.items() if losses}),
        "rule": RULE,
        "warnings": [*early, *_at_an_end(order, settings.lr)],
    }
    return conclusion | {"reason": results.probe_sentence(conclusion)}


def _compare(arm: Arm, at: float) -> list[list[float]]:
    """Fill in the figures of an arm at equal compute, with its best rate.

    Args:
        arm: a trained arm; without a finite training it becomes ``diverged``.
        at: the step of equal compute.

    Returns:
        The losses at equal compute, [seeds][windows]; empty if it diverged.
    """
    candidate, finite = arm.entry, arm.finite()
    for (lr, seed), looks in arm.runs.items():
        means = [fmean(look.losses) if look.losses else None for look in looks]
        steps = [look.step for look in looks]
        candidate.curves.append(results.ProbeCurve(lr=lr, seed=seed, steps=steps, losses=means))
    at_equal = {rate: [_losses_at(looks, at) for looks in runs] for rate, runs in finite.items()}
    by_rate = {rate: _mean(losses) for rate, losses in at_equal.items()}
    candidate.by_lr = [by_rate.get(rate) for rate in dict.fromkeys(rate for rate, _ in arm.runs)]
    if not at_equal:
        first = min(looks[-1].step for looks in arm.runs.values() if looks[-1].losses is None)
        candidate.outcome = "diverged"
        candidate.reason = (
            f"its loss is not finite with any learning rate, first after {counted(first, 'step')}"
        )
        return []
    best = min(by_rate, key=lambda rate: by_rate[rate])
    candidate.losses = [fmean(windows) for windows in at_equal[best]]
    candidate.lr, candidate.equal_step, candidate.loss = best, at, fmean(candidate.losses)
    candidate.spread = stdev(candidate.losses)
    candidate.last_loss = _mean([looks[-1].losses for looks in finite[best]])
    return at_equal[best]


def _early(candidates: Sequence[results.ProbeCandidate], warmup: int) -> Iterator[str]:
    """Warn of trainings that were too short at equal compute, or ended above their first loss."""
    least = max(FEW, 3 * warmup)
    ranked = [entry for entry in candidates if entry.equal_step is not None]
    few = [
        f"{entry.name} {f'{step:.0f}' if step >= 1 else 'less than 1'}"
        for entry in ranked
        if (step := entry.equal_step or 0) < least
    ]
    if few:
        shorter = " or a shorter --warmup" if least > FEW else ""
        yield (
            f"at equal compute few steps were taken ({', '.join(few)}; the rate is warmed up in "
            f"{warmup}), which is against larger models; take more --steps{shorter}"
        )
    if harmed := [entry.name for entry in ranked if entry.loss > entry.curves[0].losses[0]]:  # type: ignore[operator]
        yield (
            f"at equal compute the loss of {', '.join(harmed)} is above where it began, so the "
            "order means little; take more --steps, a lower --lr or a longer --warmup"
        )


def _at_an_end(
    candidates: Sequence[results.ProbeCandidate], rates: Sequence[float]
) -> Iterator[str]:
    """Warn of best rates at an end of the tried range."""
    ends = ("smallest", min(rates)), ("largest", max(rates))
    for word, end in ends if len(rates) > 1 else ():
        names = [candidate.name for candidate in candidates if candidate.lr == end]
        if names:
            yield f"{', '.join(names)} did best with the {word} rate, {end:g}; try one beyond it"


def differences_of(losses: Mapping[str, list[list[float]]]) -> list[results.ProbeDifference]:
    """Compute the differences of all pairs.

    Args:
        losses: losses by name of the model, [seeds][windows], with the same windows for all.
    """
    pairs = list(combinations(sorted(losses, key=lambda name: _mean(losses[name])), 2))
    differences = []
    for better, worse in pairs:
        seeds = zip(losses[better], losses[worse], strict=True)
        above = [[high - low for low, high in zip(*seed, strict=True)] for seed in seeds]
        interval = paired_difference(above, len(pairs))
        differences.append(results.ProbeDifference(better=better, worse=worse, **interval))
    return differences


def _losses_at(looks: Sequence[Look], step: float) -> list[float]:
    """Interpolate the losses of all windows linearly between two measurements."""
    steps = [look.step for look in looks]
    windows = zip(*(look.losses for look in looks), strict=True)
    return [float(np.interp(step, steps, losses)) for losses in windows]


def _mean(losses: Sequence[Sequence[float]]) -> float:
    return fmean(fmean(windows) for windows in losses)
