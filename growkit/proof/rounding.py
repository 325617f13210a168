"""How far a model is off in its storage dtype: of the target, as a multiple of the source.

The largest difference of a logit cannot show what a class computes a little worse in this dtype
alone. Here both models are compared with strict float64, token by token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from growkit.base.limits import SPACING
from growkit.engine.metrics import Distance, Head, logits_in_pieces

INFLATED = 1.1
"""Largest ratio of rounding errors that is no fault. Of sound pairs it is 1 to a few per cent, and
less where a class rounds less."""

STANDARD_ERRORS = 4
"""By so many standard errors of the ratio a larger one may be chance."""

SMALLEST = 2.0**-8
"""Errors of this part of a logit's rounding count as none."""


class Inflation(NamedTuple):
    """Rounding errors of the target over those of the source.

    Attributes:
        ratio: of mean KL to strict float64, or the mean ratio of tokens, whichever is nearer to
            its limit.
        limit: the largest ratio that chance and ``INFLATED`` explain.
    """

    ratio: float
    limit: float


def compare_rounding(
    exact: tuple[Head, list[Tensor]],
    source: tuple[Head, list[Tensor]],
    target: tuple[Head, list[Tensor]],
    *,
    dtype: str,
) -> tuple[Distance, Inflation]:
    """Compare both models in a dtype with logits in strict float64.

    Args:
        exact: head of the source in strict float64, and its last layer's output for every prompt,
            each [tokens, hidden].
        source: the same in the dtype.
        target: the same of the target.
        dtype: torch name of the dtype.

    Returns:
        The distance of the source from itself in strict float64, and what the target adds.
    """
    width, distance = source[1][0].shape[-1], Distance()
    states = [torch.cat(each, -1) for each in zip(source[1], target[1], strict=True)]

    def both(hidden: Tensor) -> Tensor:
        """Logits of both, [tokens, 2 · vocabulary]."""
        return torch.cat([source[0](hidden[..., :width]), target[0](hidden[..., width:])], -1)

    nothing = [torch.zeros(len(state), dtype=torch.long) for state in states]  # no losses
    errors: list[Tensor] = []
    for _, logits, rounded, following, position in logits_in_pieces(exact, (both, states), nothing):
        halves = rounded.chunk(2, -1)
        distance.add(logits, halves[0], following, position)
        errors.append(torch.stack([rounding_error(logits, half) for half in halves]))
    own, others = torch.cat(errors, -1).cpu()
    none = (SMALLEST * SPACING[dtype] * distance.scale) ** 2
    return distance, inflation(own + none, others + none)


def rounding_error(exact: Tensor, rounded: Tensor) -> Tensor:
    """KL(exact ‖ rounded) of every token to second order, [tokens], which is never negative.

    It is half the variance of the differences of logits, under the exact softmax.

    Args:
        exact: logits, [tokens, vocabulary].
        rounded: the same in another dtype.
    """
    exact = exact.double()
    share, difference = exact.softmax(-1), rounded.double() - exact
    difference = difference - (share * difference).sum(-1, keepdim=True)
    return (share * difference.square()).sum(-1) / 2


def inflation(own: Tensor, others: Tensor) -> Inflation:
    """Compare the errors of two models, [tokens] each, all greater than zero."""
    mean = float(others.mean() / own.mean())
    logs, left = (others / own).log(), (others / mean - own) / own.mean()
    inflations = [
        Inflation(ratio, INFLATED * math.exp(STANDARD_ERRORS * float(scatter) / len(own) ** 0.5))
        for ratio, scatter in ((mean, left.std()), (float(logs.mean().exp()), logs.std()))
    ]
    return max(inflations, key=lambda inflation: inflation.ratio / inflation.limit)
