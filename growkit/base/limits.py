"""The limits of the proof: margins, the limits that they give, and comparisons with a limit.

Limits are measured: a margin times the rounding error of the source itself, and never less than the
relative spacing of numbers (``docs/explanation/numerics.md``, "Strict float64").
"""

from __future__ import annotations

import math
from typing import NamedTuple

from growkit.base.lazy import Tensor

STRICT_MARGIN = 8
"""Allowed difference in strict float64, as a multiple of the source's own rounding error."""

NATIVE_MARGIN = 16
"""Allowed difference in the storage dtype, as a multiple of the source's own rounding error. Both
models round, sums may be several times as long, and the largest of many errors is compared. Bounded
promises have this limit in strict float64."""

INFLATION_MARGIN = 1.1
"""Allowed mean error in a dtype that is narrower than its sums, as a multiple of the source's. Of
sound pairs it is 1 to a few per cent, and less where a class rounds less."""

ENGINE_MARGIN = 4
"""The same of other programs, which round more or fewer intermediate values than the class."""

STANDARD_ERRORS = 4
"""By so many standard errors a larger multiple may be chance."""

DEVICE_MARGIN = 16
"""Largest ratio of a device's limit, on long prompts, to the CPU's limit on a short one."""

TRAINING_MARGIN = 8
"""Allowed difference after training, as a multiple of rounding error in the source's training."""

FINGERPRINT_MARGIN = 8
"""Allowed root mean square difference, as a multiple of the source's own rounding error."""

SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SPACING["int8"] = 2.0**-7
"""Relative spacing of the numbers of a dtype, by its torch name; of int8, that of the largest ones
in a block with a common scale."""


COMPUTED = ("float32", "float16", "bfloat16")
"""Dtypes in which models compute."""


class Limit(NamedTuple):
    """Limit for the difference of the target's logits.

    Attributes:
        largest: largest difference of a logit, relative to the scale of the logits.
        why: origin of the limit, in words.
    """

    largest: float
    why: str


def within(distance: float | None, limit: float | None) -> bool:
    """Whether a distance is finite and at most its limit.

    Args:
        distance: the distance; NaN, infinity and None (their form in results) are never within.
        limit: the limit; None admits any finite distance, and NaN admits none.
    """
    if distance is None or not math.isfinite(distance):
        return False
    return limit is None or distance <= limit


def within_each(distances: Tensor, limits: Tensor | float) -> Tensor:
    """Elementwise ``within``: a bool tensor of the broadcast shape."""
    return distances.isfinite() & (distances <= limits)


def is_identity(before: Tensor, after: Tensor) -> bool:
    """Whether a layer returned its input, but for less than float64's rounding of its largest."""
    if before.shape != after.shape:
        return False
    return bool((after - before).abs().max() <= SPACING["float64"] * before.abs().max())


def rounded_sum(terms: int) -> float:
    """Relative error of a float64 sum of n products: about eps · √n."""
    return SPACING["float64"] * math.sqrt(terms)


def strict_limit(rounding: float, one_sum: float) -> Limit:
    """Limit in strict float64.

    Args:
        rounding: change of the source's logits when one sum per layer is rounded.
        one_sum: relative error of one rounded sum, such as that of a logit.
    """
    source = "what one rounded sum per layer does to the source itself"
    largest = STRICT_MARGIN * max(rounding, one_sum)
    return Limit(largest, f"{STRICT_MARGIN} times {source}, {rounding:.1e}")


def native_limit(rounding: float, dtype: str, strict: Limit) -> Limit | None:
    """Limit in the storage dtype; never below the strict limit, as float64 rounds sums as well.

    Args:
        rounding: change of the source's logits by rounding to the dtype.
        dtype: torch name of the dtype.
        strict: the limit in strict float64.

    Returns:
        The limit; None if rounding changes the logits by their whole scale or more.
    """
    if not rounding < 1:
        return None
    source = f"what rounding to {dtype} does to the source itself"
    largest = NATIVE_MARGIN * max(rounding, SPACING[dtype])
    limit = Limit(largest, f"{NATIVE_MARGIN} times {source}, {rounding:.1e}")
    return limit if largest >= strict.largest else strict


def inflation_limit(standard_error: float, margin: float = INFLATION_MARGIN) -> float:
    """Limit for the errors of the target in a dtype, as a multiple of those of the source.

    Args:
        standard_error: of the logarithm of that multiple.
        margin: the multiple of sound models.
    """
    return margin * math.exp(STANDARD_ERRORS * standard_error)


def training_limit(rounding: float) -> float:
    """Limit for losses and logits after training.

    Args:
        rounding: change of the source's own training by rounding.
    """
    return TRAINING_MARGIN * rounding


def fingerprint_limits(rounding: float, dtype: str, terms: int) -> dict[str, float]:
    """Limits for root mean squares, by the torch name of the dtype that a model computes in.

    Args:
        rounding: change of the source's logits by rounding.
        dtype: the dtype of that measurement.
        terms: largest number of products in a sum.
    """
    measured = SPACING[dtype if dtype != "float64" else "float32"]
    limits = {}
    for name in COMPUTED:
        # Sums of narrower dtypes accumulate in float32, and only the result is rounded.
        sums = math.sqrt(terms) if name == "float32" != dtype else 1.0
        spacing = SPACING[name]
        limits[name] = FINGERPRINT_MARGIN * max(rounding * sums * spacing / measured, spacing)
    return limits
