"""How long the trainings of a probe will take, from a few steps of each model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from growkit.base.errors import InputError
from growkit.base.units import duration
from growkit.families.added import temporary_family
from growkit.probing.arms import Arm, looks_of, trainee_of
from growkit.probing.settings import ProbeSettings
from growkit.probing.text import Data
from growkit.probing.training import train
from growkit.probing.work import Work

STEPS = 3
"""Steps that are timed; the first one is left out, as it allocates."""


def time_left(
    arms: Sequence[Arm], work: Work, data: Data, settings: ProbeSettings, device: torch.device
) -> float:
    """Seconds that the trainings take which are not over.

    A look at the held-out loss is taken to cost a third of a step for each batch, as it has no
    backward pass. A model that cannot be trained takes no time.

    Args:
        arms: all that can be trained.
        work: where trainings that are over are noted.
        data: what they learn from, and are asked.
        settings: how they are trained.
        device: where.
    """
    equal = settings.steps * min(arm.step_flops for arm in arms if arm.step_flops)
    batches = -(-len(data.held_out) // settings.batch)
    seconds = 0.0
    for arm in arms:
        assert arm.step_flops
        trainings = sum(
            work.trained(arm.key, lr, seed, settings.steps, len(data.held_out)) is None
            for lr in settings.lr
            for seed in range(settings.seeds)
        )
        if trainings:
            looks = len(looks_of(settings.steps, equal / arm.step_flops))
            steps = settings.steps + looks * batches / 3
            seconds += trainings * steps * _step(arm, work, data, settings, device)
    return seconds


def _step(arm: Arm, work: Work, data: Data, settings: ProbeSettings, device: torch.device) -> float:
    """Seconds of one step; 0 if the model cannot be trained."""
    times: list[float] = []
    few = replace(settings, steps=STEPS)
    try:
        with temporary_family(arm.family):
            train(
                *(trainee_of(arm, work), data, few, min(settings.lr), 0, (), device),
                lambda _: times.append(time.perf_counter()),
            )
    except InputError:
        return 0.0  # the training itself says why
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def time_sentence(seconds: float) -> str:
    """What is shown before the trainings begin."""
    return (
        f"the trainings will take about {duration(seconds)}; fewer --steps or --seeds, or a "
        "smaller --batch or --length, take less, and more of them say more"
    )
