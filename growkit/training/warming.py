"""A rate that is warmed up again, before a schedule goes on."""

from __future__ import annotations

from collections.abc import Callable

from growkit.base.errors import InputError


def rewarming(
    steps: int, *, start: float = 0.0, then: Callable[[int], float] | None = None
) -> Callable[[int], float]:
    """What ``torch.optim.lr_scheduler.LambdaLR`` multiplies rates with, for training that goes on.

    Moments that begin anew while the optimizer's step count goes on are not corrected for their
    beginning: Adam's first update is (1 - β1) / √(1 - β2) times as long as it would be, 3.2 times
    with 0.9 and 0.999. A low rate keeps these updates small until the moments are known.

    Args:
        steps: from the low rate to the full one, in a straight line; the last of them is full.
        start: the share of the rate that the line comes from, before the first step.
        then: the factor of the schedule that goes on, by step; it always applies. 1 without.

    Returns:
        The factor of a step, counted from 0.

    Raises:
        InputError: there are too few steps, or the rate would begin below 0 or above 1.
    """
    if steps < 1:
        raise InputError(f"re-warming for {steps} steps is none; give at least 1")
    if not 0 <= start <= 1:
        raise InputError(f"re-warming cannot begin at {start:g} of the rate; give 0 to 1")

    def factor(step: int) -> float:
        warm = start + (1 - start) * min(1.0, (step + 1) / steps)
        return warm * (then(step) if then else 1.0)

    return factor
