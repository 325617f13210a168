"""Means over neighbouring positions, so that a trend shows among single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from growkit.report.markup import is_number

MOST_BINS = 16


@dataclass(frozen=True)
class Bin:
    """Neighbouring positions.

    Attributes:
        name: the first and the last of them.
        mean: over all of their tokens; None if a position has no number.
        tokens: how many these are.
    """

    name: str
    mean: float | None
    tokens: int


def binned(values: Sequence[float | None], counts: Sequence[int]) -> list[Bin]:
    """Positions in at most ``MOST_BINS`` bins of equal width, but for the last.

    Args:
        values: the mean at each position.
        counts: tokens at each position; one each if left empty.
    """
    width = 1
    while len(values) > MOST_BINS * width:
        width *= 2
    counts = counts or [1] * len(values)
    found = []
    for begin in range(0, len(values), width):
        inside, sizes = values[begin : begin + width], counts[begin : begin + width]
        last, tokens = begin + len(inside) - 1, sum(sizes)
        # What is no number must not disappear in a mean.
        known = [value for value in inside if is_number(value)]
        mean = None
        if tokens and len(known) == len(inside):
            mean = sum(v * (n / tokens) for v, n in zip(known, sizes, strict=False))
        found.append(Bin(str(begin) if last == begin else f"{begin}–{last}", mean, tokens))
    return found
