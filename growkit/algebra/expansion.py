"""The expansion of one space: how many copies every coordinate gets, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expansion:
    """E as a rule for coordinates: x' = E x repeats x.

    Attributes:
        copies: number of copies of each coordinate.
        side_by_side: copy c of coordinate i stands at copies · i + c, so that groups of neighbours
            stay together (attention heads); otherwise the whole space is repeated, and it stands
            at size · c + i (as HyperCloning is published).
    """

    copies: int = 1
    side_by_side: bool = False


NONE = Expansion()
"""A space that stays as it is."""
