"""What is seen of a training on its way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """The losses after some steps.

    Attributes:
        step: how many.
        losses: in nats per token, of every held-out window; None where one is not finite.
    """

    step: int
    losses: list[float] | None
