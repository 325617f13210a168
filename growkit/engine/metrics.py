"""Distance between the logits of two models, accumulated piece by piece."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from growkit.base.limits import SPACING, Limit
from growkit.results.proof_result import Measured

IN_CACHE = 1 << 17
"""Logits compared at a time on a CPU: few enough to stay in its cache for a dozen passes."""


@dataclass
class Distance:
    """Sums over all tokens added so far, in float64.

    Attributes:
        largest: largest absolute difference of two logits; not a sum.
        absolute: absolute differences.
        squared_source: squared logits of the source.
        squared_target: squared logits of the target.
        products: products of the two models' logits.
        elements: number of logits.
        kl: KL(source ‖ target), in nats.
        kl_at: by position, the KL and the number of tokens there.
        agreeing: number of tokens on which both rank the same token first.
        tokens: number of tokens.
        loss_source: negative log-likelihoods of the next tokens, in nats, by the source.
        loss_target: the same by the target.
        predictions: number of tokens with a next one.
    """

    largest: float = 0.0
    absolute: float = 0.0
    squared_source: float = 0.0
    squared_target: float = 0.0
    products: float = 0.0
    elements: int = 0
    kl: float = 0.0
    kl_at: dict[int, tuple[float, int]] = field(default_factory=dict)
    agreeing: int = 0
    tokens: int = 0
    loss_source: float = 0.0
    loss_target: float = 0.0
    predictions: int = 0

    def add(self, source: Tensor, target: Tensor, following: Tensor, position: int = 0) -> None:
        """Add some tokens of a sequence.

        Args:
            source: logits of the source, [tokens, vocabulary].
            target: logits of the target, the same shape.
            following: the next token of each, [tokens]; -1 for none.
            position: position of the first token in its sequence.
        """
        rows = max(1, IN_CACHE // source.shape[-1]) if source.device.type == "cpu" else len(source)
        for first in range(0, len(source), rows):
            part = slice(first, first + rows)
            self._add(source[part], target[part], following[part], position + first)

    def _add(self, source: Tensor, target: Tensor, following: Tensor, position: int) -> None:
        source, target = source.double(), target.double()
        following = following.to(source.device)
        # A NaN must never pass: torch's maximum keeps it, Python's may drop it.
        difference = (source - target).abs_()
        self.largest = float(torch.maximum(difference.max(), difference.new_tensor(self.largest)))
        self.absolute += float(difference.sum())
        del difference
        one, other = source.flatten(), target.flatten()
        self.squared_source += float(one.dot(one))
        self.squared_target += float(other.dot(other))
        self.products += float(one.dot(other))
        self.elements += source.numel()
        self.agreeing += int((source.argmax(-1) == target.argmax(-1)).sum())
        log_p, log_q = source.log_softmax(-1), target.log_softmax(-1)
        rows = (following >= 0).nonzero()[:, 0]
        wanted = following[rows]
        self.loss_source -= float(log_p[rows, wanted].sum())
        self.loss_target -= float(log_q[rows, wanted].sum())
        self.predictions += len(rows)
        # In place: logits of large vocabularies are large.
        torch.sub(log_p, log_q, out=log_q)
        kl = log_p.exp_().mul_(log_q).sum(-1)
        self.kl += float(kl.sum())
        for place, value in enumerate(kl.tolist(), position):
            total, count = self.kl_at.get(place, (0.0, 0))
            self.kl_at[place] = (total + value, count + 1)
        self.tokens += len(following)

    @property
    def scale(self) -> float:
        """Root mean square of the source's logits."""
        return math.sqrt(self.squared_source / self.elements)

    @property
    def usable(self) -> bool:
        """Whether the source's logits are finite."""
        return math.isfinite(self.squared_source)

    @property
    def relative(self) -> float:
        """Largest difference relative to the scale; NaN if a logit is not finite."""
        return self.largest / self.scale if self.scale else self.largest

    @property
    def kl_per_token(self) -> float:
        """Mean KL(source ‖ target) per token, in nats; 0 if it is within rounding."""
        return self._without_rounding(self.kl / self.tokens)

    def _without_rounding(self, kl: float) -> float:
        """Return a KL, or 0 if float64 rounding alone explains it.

        Each term is a difference of logarithms as large as logits, and is rounded like these. The
        sum may therefore be slightly negative, which a true KL never is.
        """
        return 0.0 if abs(kl) <= SPACING["float64"] * (1 + self.scale) else kl

    def factor(self, within: float) -> float | None:
        """Fit one factor to all logits; None if it does not explain the difference.

        Args:
            within: largest residual, relative to the explained part.
        """
        if not self.squared_source or not math.isfinite(self.products + self.squared_target):
            return None
        factor = self.products / self.squared_source
        left = self.squared_target - factor * self.products
        explained = left <= (within * (1 + abs(factor))) ** 2 * self.squared_source
        return factor if explained and abs(factor - 1) > within else None

    def measured(self, dtype: str, device: str, limit: Limit | None) -> Measured:
        """The figures of the report."""
        return Measured(
            dtype=dtype,
            device=device,
            max_abs_logit_diff=finite(self.largest),
            mean_abs_logit_diff=finite(self.absolute / self.elements),
            logit_scale=finite(self.scale),
            relative=finite(self.relative),
            tolerance=limit and limit.largest,
            tolerance_why=limit and limit.why,
            kl_nats_per_token=finite(self.kl_per_token),
            top1_agreement=self.agreeing / self.tokens,
        )

    def kl_by_position(self) -> list[float | None]:
        """Mean KL at every position, in nats, over all sequences that reach it."""
        means = (kl / count for _, (kl, count) in sorted(self.kl_at.items()))
        return [finite(self._without_rounding(mean)) for mean in means]

    def tokens_by_position(self) -> list[int]:
        """Number of tokens behind each mean of ``kl_by_position``."""
        return [count for _, (_, count) in sorted(self.kl_at.items())]


def finite(value: float) -> float | None:
    """Replace NaN and infinity by None, since JSON has neither."""
    return value if math.isfinite(value) else None


Head = Callable[[Tensor], Tensor]
"""Maps the last layer's output, [tokens, hidden], to logits, [tokens, vocabulary]."""

TOKENS_FIRST = 64
"""Tokens in the first piece, while the size of the vocabulary is unknown."""

LOGITS_AT_ONCE = 1 << 24
"""Logits of one model compared at a time; the head is read once for each piece."""


def distance_of(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Distance:
    """Measure the distance between the logits of two models; see ``logits_in_pieces``."""
    distance = Distance()
    for _, logits, others, following, position in logits_in_pieces(source, target, ids):
        distance.add(logits, others, following, position)
    return distance


def logits_in_pieces(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, int]]:
    """Compute the logits of two models over all prompts, in pieces that fit in memory.

    Args:
        source: head of the source, and its last layer's output per prompt, each [tokens, hidden].
        target: the same for the target.
        ids: token ids of every prompt, each [tokens].

    Yields:
        The index of a prompt, and the arguments of ``Distance.add`` for some of its tokens.
    """
    following = [torch.cat([tokens[1:], tokens.new_full((1,), -1)]) for tokens in ids]
    begins = [0, *accumulate(map(len, ids))]
    at_once, start = TOKENS_FIRST, 0
    while start < begins[-1]:
        end = min(start + at_once, begins[-1])
        taken = [
            (index, slice(max(start, begins[index]) - begins[index], end - begins[index]))
            for index in range(bisect_right(begins, start) - 1, bisect_left(begins, end))
        ]
        sizes = [len(ids[of][rows]) for of, rows in taken]
        logits, others = (
            head(torch.cat([states[of][rows] for of, rows in taken])).split(sizes)
            for head, states in (source, target)
        )
        for (of, rows), one, other in zip(taken, logits, others, strict=True):
            yield of, one, other, following[of][rows], rows.start
        start, at_once = end, max(1, LOGITS_AT_ONCE // logits[0].shape[-1])


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the root mean square of the expected values."""
    scale = expected.square().mean().sqrt().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((actual - expected).abs_().max() / scale)
