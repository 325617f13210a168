"""The limits of the proof: margins, what follows from them, and what is within a limit.

Limits are measured: a margin times what rounding does to the source itself, and never less than
the relative spacing of numbers (``docs/numerics.md``, "Strict float64").
"""

from __future__ import annotations

import math
from typing import NamedTuple

from growkit.base.lazy import Tensor

STRICT_MARGIN = 8
"""How many times what rounding does to the source the target may differ in strict float64."""

NATIVE_MARGIN = 16
"""How many times the source's own rounding error the target may differ: both round, over sums up to
some times as long, and the largest of many errors is compared."""

TRAINING_MARGIN = 8
"""How many times what rounding does to the source's training the target's may differ."""

FINGERPRINT_MARGIN = 8
"""How many times what rounding does to the source a model may differ, as root mean squares."""

SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative spacing of the numbers of a dtype, by its torch name."""


COMPUTED = ("float32", "float16", "bfloat16")
"""Dtypes in which models compute."""


class Limit(NamedTuple):
    """What the logits of the target may differ by.

    Attributes:
        largest: difference of a logit, relative to their scale.
        why: where it comes from, in words.
    """

    largest: float
    why: str


def within(distance: float | None, limit: float | None) -> bool:
    """Whether a distance is at most its limit: equal is within, NaN never is.

    Args:
        distance: never within a limit where it is NaN, infinite or None, as results write both.
        limit: None for any finite distance; nothing is within NaN.
    """
    if distance is None or not math.isfinite(distance):
        return False
    return limit is None or distance <= limit


def within_each(distances: Tensor, limits: Tensor | float) -> Tensor:
    """The same of every element: a bool tensor of the shape that both broadcast to."""
    return distances.isfinite() & (distances <= limits)


def rounded_sum(terms: int) -> float:
    """Relative error of a sum in float64: of n products it is about eps · √n."""
    return SPACING["float64"] * math.sqrt(terms)


def strict_limit(rounding: float) -> Limit:
    """In strict float64.

    Args:
        rounding: what one rounded sum per layer changes in the source's logits.
    """
    source = "what one rounded sum per layer does to the source itself"
    largest = STRICT_MARGIN * max(rounding, SPACING["float64"])
    return Limit(largest, f"{STRICT_MARGIN} times {source}, {rounding:.1e}")


def native_limit(rounding: float, dtype: str, strict: Limit) -> Limit | None:
    """In the storage dtype; never below the strict limit, as float64 rounds sums as well.

    Args:
        rounding: what rounding to the dtype changes in the source's logits.
        dtype: its torch name.
        strict: the limit in strict float64.

    Returns:
        None where rounding changes the source's logits by their scale: nothing is to be kept.
    """
    if not rounding < 1:
        return None
    source = f"what rounding to {dtype} does to the source itself"
    largest = NATIVE_MARGIN * max(rounding, SPACING[dtype])
    limit = Limit(largest, f"{NATIVE_MARGIN} times {source}, {rounding:.1e}")
    return limit if largest >= strict.largest else strict


def training_limit(rounding: float) -> float:
    """Of losses and logits after training.

    Args:
        rounding: what rounding changes in the source's own training.
    """
    return TRAINING_MARGIN * rounding


def fingerprint_limits(rounding: float, dtype: str, terms: int) -> dict[str, float]:
    """Of root mean squares, by the torch name of the dtype in which a model computes.

    Args:
        rounding: what rounding changes in the source's logits.
        dtype: the dtype in which that was measured.
        terms: the most products that are summed up.
    """
    measured = SPACING[dtype if dtype != "float64" else "float32"]
    limits = {}
    for name in COMPUTED:
        # Narrower dtypes are summed up in float32, and only the result is rounded.
        sums = math.sqrt(terms) if name == "float32" != dtype else 1.0
        spacing = SPACING[name]
        limits[name] = FINGERPRINT_MARGIN * max(rounding * sums * spacing / measured, spacing)
    return limits
