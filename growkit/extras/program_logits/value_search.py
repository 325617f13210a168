"""The search for the value of a setting with which a model computes what a program computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

POWERS = (-3, -2, -1, -0.5, 0.5, 1, 2, 3)
"""Powers of ten by which a setting is multiplied at first."""

FITTED = 2
"""Number of settings that are varied in the last rounds."""

ROUNDS, MAX_ROUNDS, GAIN = 4, 12, 4
"""Rounds after which the KL must be lower by a factor, and the most of them."""

DIGITS = (1, 2, 3, 4, 5, 17)
"""Numbers of digits to which the value that is found is rounded."""

Measure = Callable[[Mapping[str, Sequence[float]]], Mapping[str, Mapping[float, float]]]
"""Measures the KL with each of some values of some settings; without those that no class takes."""


def closest_value(
    measure: Measure, numbers: Mapping[str, float], base: float, enough: float
) -> tuple[str, list[float]]:
    """Find the setting and the value with the least KL.

    Args:
        measure: measures the KL in nats per token.
        numbers: at least one setting, with its value in the config.
        base: KL with these values.
        enough: KL at which a value is found.

    Returns:
        The key of the setting, and its value with ever more digits.
    """
    kls = {key: {value: base} for key, value in numbers.items()}
    values = {key: [value * 10**power for power in POWERS] for key, value in numbers.items()}
    for tried in range(MAX_ROUNDS):
        for key, measured in measure(values).items():
            kls[key] |= measured
        left = max(FITTED, len(numbers) >> tried)  # one round does not show which is right
        chosen = sorted(kls, key=lambda key: min(kls[key].values()))[:left]
        least = min(kls[chosen[0]].values())
        if least <= enough or (tried == ROUNDS and least > base / GAIN):
            break
        values = {key: closer_values(kls[key]) for key in chosen}
    best = min(kls[chosen[0]], key=lambda value: kls[chosen[0]][value])
    return chosen[0], [*dict.fromkeys(float(f"{best:.{digits}g}") for digits in DIGITS)]


def closer_values(tried: Mapping[float, float]) -> list[float]:
    """Values of a setting to try next, so that the KL comes closer to zero.

    Near the right value, the root of the KL grows linearly to both sides. Most settings are round
    numbers, so that the roundest one near each value is tried as well.

    Args:
        tried: KL in nats per token, by value.
    """
    values = sorted(tried)
    best = min(values, key=lambda value: tried[value])
    place = values.index(best)
    low = values[place - 1] if place else best / 1000
    high = values[place + 1] if place + 1 < len(values) else best * 1000
    near = [math.sqrt(low * best), math.sqrt(best * high)]
    for other in tried.keys() & {low, high}:
        error, another = math.sqrt(tried[best]), math.sqrt(tried[other])
        for total in (error + another, error - another):
            if math.isfinite(total) and total:
                near.append(best + (other - best) * error / total)
    inside = [value for value in near if low < value < high and value not in tried]
    return [*dict.fromkeys([*(_roundest(value, low, high) for value in inside), *inside])]


def _roundest(value: float, low: float, high: float) -> float:
    """The value with the fewest digits between two others, rounded to which it is nearest."""
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((number for number in rounded if low < number < high), value)
