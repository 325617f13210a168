"""What the demo reports."""

from __future__ import annotations

from growkit.results.operation import GrowResult
from growkit.results.result import Result


class Story(Result):
    """What the demo did.

    Attributes:
        growth: the growth with its proof on held-out text.
        opening: what both models were given to continue.
        before: the source's greedy continuation.
        after: the grown model's.
        kept_in: folder of the grown model; null if it was thrown away.
    """

    growth: GrowResult
    opening: str
    before: str
    after: str
    kept_in: str | None
