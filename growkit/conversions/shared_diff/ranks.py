"""The rank that a promise needs: the smallest one that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from growkit.errors import InputError
from growkit.limits import within

RANKS_PER_PASS = 8
"""Ranks that are tried in one pass over the model."""


def smallest_rank(
    most: int, costs: Callable[[Sequence[int]], Mapping[int, float]], tolerance: float
) -> tuple[int, dict[int, float]]:
    """The rank that keeps a tolerance, where the one below does not.

    Costs fall as ranks rise, but for noise: ranks are tried in a geometric ladder, then between the
    last one that fails and the first one that keeps it, until these are neighbours.

    Args:
        most: the largest rank that makes sense.
        costs: takes ranks, gives what each of them costs.
        tolerance: what a rank may cost.

    Returns:
        The rank, and the cost of every rank that was tried.

    Raises:
        InputError: no rank keeps the tolerance.
    """
    tried: dict[int, float] = {}
    below, above = 0, most + 1
    while above - below > 1:
        tried |= costs(_ladder(below, above, most))
        kept = [rank for rank, cost in tried.items() if within(cost, tolerance)]
        if not kept:
            raise InputError(
                f"no rank keeps a tolerance of {tolerance:g}: rank {most} still costs "
                f"{tried[most]:.3g}; pass a wider --dtype or a larger tolerance"
            )
        above = min(kept)
        below = max((rank for rank in tried if rank < above), default=0)
    return above, dict(sorted(tried.items()))


def _ladder(below: int, above: int, most: int) -> list[int]:
    """Ranks between two bounds, not all of them if there are many."""
    if above > most:  # the first time: from one end to the other
        steps = {round(most ** (i / (RANKS_PER_PASS - 1))) for i in range(RANKS_PER_PASS)}
        return sorted(steps | {1, most})
    between = range(below + 1, above)
    step = -(-len(between) // RANKS_PER_PASS)
    return list(between[::step])
