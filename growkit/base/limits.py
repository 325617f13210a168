"""The one rule by which a measured distance is within its limit: equal is within, NaN never is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def within(distance: float | None, limit: float | None) -> bool:
    """Whether a distance is at most its limit.

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
