"""Warmup, stable, decay: one trunk with a constant rate, and branches on which the rate decays.

A model is only as good as it can be for its budget after the rate has decayed. With a trunk that
does not decay, every budget costs no more than its own decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Steps of a training without a turn.

    Attributes:
        begin: number of the first step.
        end: number of the step after the last.
        point: the number of the point that is reached by decaying; None on the trunk.
    """

    begin: int
    end: int
    point: int | None = None

    @property
    def decays(self) -> bool:
        """Whether it is a branch."""
        return self.point is not None


def segments(points: Sequence[int], decay: float, handed_on: int = 0) -> list[Segment]:
    """The whole training: trunk to the first branch, the branch, trunk to the next, and so on.

    Args:
        points: steps after which the rate shall have decayed, in ascending order.
        decay: the share of a point's steps in which it does.
        handed_on: the step to which the trunk goes on after all branches, for what starts there.
    """
    found, at = [], 0
    for number, end in enumerate(points):
        branch = end - max(1, round(decay * end))
        if branch > at:
            found.append(Segment(at, branch))
            at = branch
        found.append(Segment(branch, end, number))
    if handed_on > at:
        found.append(Segment(at, handed_on))
    return found


def rate_factor(segment: Segment, step: int, warmup: int) -> float:
    """What the rate is multiplied with in a step, counted from 0.

    Args:
        segment: of the step.
        step: its number.
        warmup: steps in which the rate rises in a straight line; 0 for none.
    """
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    left = (segment.end - step) / (segment.end - segment.begin) if segment.decays else 1.0
    return warm * left
