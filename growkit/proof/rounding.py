"""The target's rounding error in the storage dtype, as a multiple of the source's.

The largest difference of a logit cannot show what a class computes a little worse in this dtype
alone. Here both models are compared with strict float64, token by token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from growkit.base.limits import INFLATION_MARGIN, SPACING, inflation_limit
from growkit.engine.metrics import Distance, Head, logits_in_pieces

MIN_TOKENS = 32
"""Fewest tokens to compare: the standard error of fewer is so uncertain that sound pairs exceed the
limit, one in a hundred with 8 tokens."""

SMALLEST = 2.0**-8
"""Part of the rounding of a logit, at the logit scale, that is added to all errors."""


class Inflation(NamedTuple):
    """Rounding errors of the target over those of the source.

    Attributes:
        ratio: of mean KL to strict float64, or the mean ratio of tokens, whichever is nearer to
            its limit.
        limit: see ``inflation_limit``.
    """

    ratio: float
    limit: float


def compare_rounding(
    exact: tuple[Head, list[Tensor]],
    source: tuple[Head, list[Tensor]],
    target: tuple[Head, list[Tensor]],
    *,
    dtype: str,
) -> tuple[Distance, Inflation | None]:
    """Compare both models in a dtype with logits in strict float64.

    Args:
        exact: head of the source in strict float64, and its last layer's output for every prompt,
            each [tokens, hidden].
        source: the same in the dtype.
        target: the same of the target.
        dtype: torch name of the dtype.

    Returns:
        The distance of the source from itself in strict float64, and what the target adds; None for
        fewer than ``MIN_TOKENS`` tokens.
    """
    width, distance = source[1][0].shape[-1], Distance()
    states = [torch.cat(pair, -1) for pair in zip(source[1], target[1], strict=True)]

    def both(hidden: Tensor) -> Tensor:
        """Logits of both, [tokens, 2 · vocabulary]."""
        return torch.cat([source[0](hidden[..., :width]), target[0](hidden[..., width:])], -1)

    no_labels = [torch.zeros(len(state), dtype=torch.long) for state in states]  # no losses
    errors: list[Tensor] = []
    for _, logits, rounded, following, position in logits_in_pieces(
        exact, (both, states), no_labels
    ):
        halves = rounded.chunk(2, -1)
        distance.add(logits, halves[0], following, position)
        errors.append(torch.stack([rounding_error(logits, half) for half in halves]))
    of_source, of_target = torch.cat(errors, -1).cpu()
    if len(of_source) < MIN_TOKENS:
        return distance, None
    # Logits may be so small that they, and the parts of their sums, are multiples of the dtype's
    # smallest number.
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal * SPACING[dtype]
    floor = max(SMALLEST * SPACING[dtype] * distance.scale, 2 * smallest) ** 2
    return distance, inflation(of_source + floor, of_target + floor)


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


def inflation(of_source: Tensor, of_target: Tensor, margin: float = INFLATION_MARGIN) -> Inflation:
    """Compare the errors of two models.

    Args:
        of_source: errors of the source, [tokens], all greater than zero, in nats.
        of_target: the same of the target.
        margin: see ``inflation_limit``.
    """
    mean, tokens = float(of_target.mean() / of_source.mean()), len(of_source)
    logs = (of_target / of_source).log()
    # The delta method: their deviation is that of the logarithm of a ratio of means.
    residuals = (of_target / mean - of_source) / of_source.mean()
    inflations = [
        Inflation(ratio, inflation_limit(float(deviation) / tokens**0.5, margin))
        for ratio, deviation in ((mean, residuals.std()), (float(logs.mean().exp()), logs.std()))
    ]
    return max(inflations, key=lambda inflation: inflation.ratio / inflation.limit)
