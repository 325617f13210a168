"""From losses on the way to an order: everything is compared after equal compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import fmean, stdev

from growkit.probing.arms import Arm
from growkit.probing.noise import RULE, estimate
from growkit.probing.training import Look
from growkit.results.probe import (
    OUTCOMES,
    ProbeCandidate,
    ProbeCurve,
    ProbeDifference,
    ProbeResult,
    probe_sentence,
)
from growkit.results.sentences import counted

FEW = 30
"""Steps before which nothing is concluded, however soon the rate is reached."""

Runs = Mapping[tuple[float, int], Sequence[Look]]
"""Of one that is trained, by rate and seed."""


def conclude(result: ProbeResult, arms: Sequence[Arm]) -> None:
    """Fill in what a result says of those that were tried, in their order.

    Args:
        result: with everything else.
        arms: the source and the candidates.
    """
    reached = [
        arm.step_flops * most for arm in arms if arm.step_flops and (most := _reached(arm.runs))
    ]
    result.equal_compute = float(min(reached)) if reached else None
    losses: dict[str, list[list[float]]] = {}
    told = []
    for arm in arms:
        candidate = _reported(arm)
        if arm.runs and arm.step_flops:
            found = _compared(candidate, arm.runs, (result.equal_compute or 0) / arm.step_flops)
            losses |= {arm.name: found} if found else {}
        told.append(candidate)
    told.sort(key=lambda each: (OUTCOMES.index(each.outcome), each.loss or 0.0))
    able = [each for each in told if each.outcome != "refused"]
    for number, candidate in enumerate(able, 1):
        candidate.rank = number
    result.candidates, result.differences = told, differences_of(losses)
    early = [*_begun(result), *_above_start(result)]
    result.warnings += [*early, *_at_an_end(result)]
    result.early, result.rule = bool(early), RULE
    result.reason = probe_sentence(result)


def _reached(runs: Runs) -> int:
    """The steps that all trainings with some rate reached; 0 if with none all were finite."""
    return max((looks[0][-1].step for looks in _finite(runs).values()), default=0)


def _reported(arm: Arm) -> ProbeCandidate:
    """What is known of it before anything is compared."""
    recipe = arm.candidate.recipe.by_names() if arm.candidate else None
    steps = (
        [", ".join(f"{k} {v}" for k, v in each.as_dict().items()) for each in recipe.steps]
        if recipe
        else []
    )
    curves = [
        ProbeCurve(
            lr=lr,
            seed=seed,
            steps=[look.step for look in looks],
            losses=[fmean(look.losses) if look.losses else None for look in looks],
        )
        for (lr, seed), looks in arm.runs.items()
    ]
    return ProbeCandidate(
        name=arm.name,
        source=arm.candidate is None,
        rank=None,
        outcome="ranked" if arm.outcome == "grown" else arm.outcome,
        reason=arm.reason,
        steps=steps,
        promise=arm.promise,
        parameters=arm.parameters,
        step_flops=arm.step_flops,
        lr=None,
        equal_step=None,
        loss=None,
        spread=None,
        losses=[],
        last_loss=None,
        by_lr=[],
        curves=curves,
    )


def _compared(candidate: ProbeCandidate, runs: Runs, at: float) -> list[list[float]]:
    """Fill in how one did at equal compute, with the rate with which it did best.

    Args:
        candidate: what is filled in; one that was finite with no rate becomes ``diverged``.
        runs: its trainings.
        at: the step of equal compute.

    Returns:
        The losses there, [seeds][windows]; none of one that diverged.
    """
    finite = _finite(runs)
    found = {rate: [_losses_at(looks, at) for looks in each] for rate, each in finite.items()}
    means = {rate: _mean(found[rate]) if rate in found else None for rate, _ in runs}
    candidate.by_lr = list(means.values())
    if not found:
        candidate.outcome, candidate.reason = "diverged", _diverged(runs)
        return []
    best = min(found, key=lambda rate: _mean(found[rate]))
    by_seed = [fmean(each) for each in found[best]]
    candidate.lr, candidate.equal_step = best, at
    candidate.loss, candidate.spread, candidate.losses = fmean(by_seed), stdev(by_seed), by_seed
    candidate.last_loss = _mean([looks[-1].losses or [] for looks in finite[best]])
    return found[best]


def _begun(result: ProbeResult) -> Iterator[str]:
    """Trainings that had hardly begun when they were compared."""
    least = max(FEW, 3 * result.warmup)
    found = [each for each in result.candidates if each.equal_step and each.equal_step < least]
    if found:
        named = ", ".join(f"{each.name} {_steps(each.equal_step or 0)}" for each in found)
        shorter = " or a shorter --warmup" if least > FEW else ""
        yield (
            f"at equal compute few steps were taken ({named}; the rate is warmed up in "
            f"{result.warmup}), which is against larger models; take more --steps{shorter}"
        )


def _steps(count: float) -> str:
    return f"{count:.0f}" if count >= 1 else "less than 1"


def _above_start(result: ProbeResult) -> Iterator[str]:
    """Trainings that have only done harm so far, where whoever takes fewer steps is ahead."""
    names = [
        each.name
        for each in result.candidates
        if each.loss is not None and each.loss > (each.curves[0].losses[0] or 0.0)
    ]
    if names:
        yield (
            f"at equal compute the loss of {', '.join(names)} is above where it began, so the "
            "order says little; take more --steps, a lower --lr or a longer --warmup"
        )


def _at_an_end(result: ProbeResult) -> Iterator[str]:
    """Rates that might have been better had they been tried."""
    if len(result.lr) < 2:
        return
    for word, end in (("smallest", min(result.lr)), ("largest", max(result.lr))):
        names = [each.name for each in result.candidates if each.lr == end]
        if names:
            yield (f"{', '.join(names)} did best with the {word} rate, {end:g}; try one beyond it")


def differences_of(losses: Mapping[str, list[list[float]]]) -> list[ProbeDifference]:
    """All pairs.

    Args:
        losses: of each by its name, [seeds][windows], the same windows for all.
    """
    pairs = list(combinations(sorted(losses, key=lambda name: _mean(losses[name])), 2))
    found = []
    for better, worse in pairs:
        apart = estimate(
            [
                [high - low for low, high in zip(one, other, strict=True)]
                for one, other in zip(losses[better], losses[worse], strict=True)
            ],
            len(pairs),
        )
        found.append(
            ProbeDifference(
                better=better,
                worse=worse,
                difference=apart.mean,
                low=apart.low,
                high=apart.high,
                noise=apart.noise,
            )
        )
    return found


def _finite(runs: Runs) -> dict[float, list[Sequence[Look]]]:
    """The trainings of every seed, of the rates with which no loss was anything but finite."""
    by_rate: dict[float, list[Sequence[Look]]] = {}
    for (rate, _), looks in runs.items():
        by_rate.setdefault(rate, []).append(looks)
    return {
        rate: every
        for rate, every in by_rate.items()
        if all(look.losses is not None for looks in every for look in looks)
    }


def _diverged(runs: Runs) -> str:
    first = min(look.step for looks in runs.values() for look in looks if look.losses is None)
    return f"its loss is not finite with any learning rate, first after {counted(first, 'step')}"


def _losses_at(looks: Sequence[Look], step: float) -> list[float]:
    """The losses of all windows after some steps, in a straight line between two looks."""
    for before, after in pairwise(looks):
        if step <= after.step:
            share = (step - before.step) / (after.step - before.step)
            pairs = zip(before.losses or [], after.losses or [], strict=True)
            return [low + share * (high - low) for low, high in pairs]
    assert math.isclose(step, looks[-1].step), "equal compute is what all have reached"
    return looks[-1].losses or []


def _mean(losses: Sequence[Sequence[float]]) -> float:
    return fmean(fmean(each) for each in losses)
