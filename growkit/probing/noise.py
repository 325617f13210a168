"""Whether a difference is noise: Student's t on losses that are paired by seed and by window.

Two trainings of a seed see the same batches, and are asked the same held-out windows, so their
losses are compared pair by pair. The mean difference is uncertain because other orders of batches
would have given others (spread over seeds), and other held-out text (spread over windows). With S
seeds and W windows, the standard error of the mean of S · W differences is taken as

    se² = s²_seeds / S + s²_windows / W

with the variances of the means of every seed, and of every window; both hold a part of what is in
the other, so that it is rather too large. It has (Satterthwaite, 1946)

    se⁴ / ((s²_seeds / S)² / (S - 1) + (s²_windows / W)² / (W - 1))

degrees of freedom, rounded down. A difference is more than noise if the interval of Student's t
("The probable error of a mean", 1908) around it leaves out 0, and if it is more than the rounding
of losses in float32 makes. Of m pairs that are compared, each
has an interval for 1 - 5 % / m, so that all of them hold at once in 95 % of probes (Dunn, 1961).
Where several learning rates were tried, the best of each is compared; choosing it is no part of the
interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from growkit.base.limits import within

CONFIDENCE = 0.95
"""Of all intervals together."""

ROUNDING = 1e-5
"""Nats per token; models that compute the same in other orders may differ by a part of it."""

RULE = (
    "A difference counts as noise unless the interval of Student's t around it leaves out 0 and it "
    "is more than rounding makes, 1e-5. "
    "Losses are paired by seed and by held-out window; the standard error adds the spreads over "
    "both (degrees of freedom: Satterthwaite 1946). Intervals of all pairs hold together with "
    "95 % (Dunn 1961)."
)


@dataclass(frozen=True)
class Estimate:
    """A difference of two losses.

    Attributes:
        mean: of all pairs.
        low: where its interval begins.
        high: where it ends.
    """

    mean: float
    low: float
    high: float

    @property
    def noise(self) -> bool:
        """Whether the interval holds 0, or rounding may have made the difference."""
        return self.low <= 0 <= self.high or within(abs(self.mean), ROUNDING)


def estimate(differences: Sequence[Sequence[float]], pairs: int = 1) -> Estimate:
    """What is known of a difference.

    Args:
        differences: of the losses of every seed, at least two, on every window, at least two.
        pairs: how many such differences are looked at.
    """
    by_seed = [fmean(each) for each in differences]
    by_window = [fmean(each) for each in zip(*differences, strict=True)]
    squares = [variance(each) / len(each) for each in (by_seed, by_window)]
    total = sum(squares)
    mean = fmean(by_seed)
    if total == 0:
        return Estimate(mean, mean, mean)
    free = total**2 / (
        squares[0] ** 2 / (len(by_seed) - 1) + squares[1] ** 2 / (len(by_window) - 1)
    )
    reach = t_beyond((1 - CONFIDENCE) / pairs, math.floor(free + 1e-9)) * math.sqrt(total)
    return Estimate(mean, mean - reach, mean + reach)


def t_beyond(probability: float, freedom: int) -> float:
    """The t that a variable of Student's distribution passes, up or down, with a probability.

    Args:
        probability: between 0 and 1.
        freedom: degrees of freedom, from 1 upwards.
    """
    low, high = 0.0, 1.0
    while passed(high, freedom) > probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if passed(middle, freedom) > probability else (low, middle)
    return high


def passed(t: float, freedom: int) -> float:
    """The probability that |t| is passed (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term, total = 1.0, 0.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (number - 1) / number
    if not odd:
        return 1 - math.sin(angle) * total
    return 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
