"""How far apart two models' logits are, summed up piece by piece."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from growkit.base.limits import SPACING, Limit
from growkit.results.proof import Measured

IN_CACHE = 1 << 17
"""Logits that are compared together on a CPU: a dozen passes over them stay in its cache."""


@dataclass
class Distance:
    """Sums over all tokens seen so far; all in float64."""

    largest: float = 0.0
    absolute: float = 0.0
    squared_source: float = 0.0
    squared_target: float = 0.0
    both: float = 0.0
    elements: int = 0
    kl: float = 0.0
    kl_at: dict[int, tuple[float, int]] = field(default_factory=dict)
    agreeing: int = 0
    tokens: int = 0
    loss_source: float = 0.0
    loss_target: float = 0.0
    predictions: int = 0

    def add(self, source: Tensor, target: Tensor, following: Tensor, position: int = 0) -> None:
        """Take some tokens of a sequence into account.

        Args:
            source: logits of the source, [tokens, vocabulary].
            target: logits of the target, the same shape.
            following: the token that follows each, [tokens]; -1 for none.
            position: of the first of them in its sequence.
        """
        rows = max(1, IN_CACHE // source.shape[-1]) if source.device.type == "cpu" else len(source)
        for first in range(0, len(source), rows):
            part = slice(first, first + rows)
            self._add(source[part], target[part], following[part], position + first)

    def _add(self, source: Tensor, target: Tensor, following: Tensor, position: int) -> None:
        source, target = source.double(), target.double()
        following = following.to(source.device)
        # torch's maximum keeps a NaN, Python's may drop it; and a NaN must never pass.
        difference = (source - target).abs_()
        self.largest = float(torch.maximum(difference.max(), difference.new_tensor(self.largest)))
        self.absolute += float(difference.sum())
        del difference
        one, other = source.flatten(), target.flatten()
        self.squared_source += float(one.dot(one))
        self.squared_target += float(other.dot(other))
        self.both += float(one.dot(other))
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
        """Whether the source answers with numbers at all."""
        return math.isfinite(self.squared_source)

    @property
    def relative(self) -> float:
        """Largest difference against the scale; NaN where a logit is not finite."""
        return self.largest / self.scale if self.scale else self.largest

    @property
    def kl_per_token(self) -> float:
        """KL(source ‖ target) in nats, the mean over tokens; 0 where there is only rounding."""
        return self._without_rounding(self.kl / self.tokens)

    def _without_rounding(self, kl: float) -> float:
        """A KL, or 0 if it is no more than what rounding in float64 makes of no KL at all.

        Its terms are rounded as the logarithms that they are differences of, which are as large as
        logits: a sum may as well be less than 0, which no KL is.
        """
        return 0.0 if abs(kl) <= SPACING["float64"] * (1 + self.scale) else kl

    def factor(self, within: float) -> float | None:
        """The number by which all logits are multiplied, if that explains the difference.

        Args:
            within: how much may be left over, relative to what is explained.
        """
        if not self.squared_source or not math.isfinite(self.both + self.squared_target):
            return None
        factor = self.both / self.squared_source
        left = self.squared_target - factor * self.both
        explained = left <= (within * (1 + abs(factor))) ** 2 * self.squared_source
        return factor if explained and abs(factor - 1) > within else None

    def measured(self, dtype: str, device: str, limit: Limit | None) -> Measured:
        """The figures, as they are reported."""
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
        """KL at every position, nats, the mean over all sequences that are so long."""
        means = (kl / count for _, (kl, count) in sorted(self.kl_at.items()))
        return [finite(self._without_rounding(mean)) for mean in means]

    def tokens_by_position(self) -> list[int]:
        """The number of tokens of each of these means."""
        return [count for _, (_, count) in sorted(self.kl_at.items())]


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


Head = Callable[[Tensor], Tensor]
"""From the last layer's output, [tokens, hidden], to logits, [tokens, vocabulary]."""

TOKENS_FIRST = 64
"""Tokens whose logits come first, before the size of the vocabulary is known."""

LOGITS_AT_ONCE = 1 << 24
"""Logits of one model that are compared at a time; for each, the head is read once."""


def distance_of(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Distance:
    """How far the logits of two models are apart; see ``logits_in_pieces``."""
    distance = Distance()
    for _, logits, others, following, position in logits_in_pieces(source, target, ids):
        distance.add(logits, others, following, position)
    return distance


def logits_in_pieces(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, int]]:
    """Logits of two models, of as many tokens at a time as there is room for, over all prompts.

    Args:
        source: its head, and the output of its last layer for every prompt, each [tokens, hidden].
        target: likewise.
        ids: the tokens of every prompt, each [tokens].

    Yields:
        The index of a prompt, and arguments of ``Distance.add`` for some of its tokens.
    """
    following = [torch.cat([each[1:], each.new_full((1,), -1)]) for each in ids]
    begins = [0, *accumulate(map(len, ids))]
    at_once, begin = TOKENS_FIRST, 0
    while begin < begins[-1]:
        end = min(begin + at_once, begins[-1])
        taken = [
            (index, slice(max(begin, begins[index]) - begins[index], end - begins[index]))
            for index in range(bisect_right(begins, begin) - 1, bisect_left(begins, end))
        ]
        sizes = [len(ids[of][rows]) for of, rows in taken]
        logits, others = (
            head(torch.cat([states[of][rows] for of, rows in taken])).split(sizes)
            for head, states in (source, target)
        )
        for (of, rows), one, other in zip(taken, logits, others, strict=True):
            yield of, one, other, following[of][rows], rows.start
        begin, at_once = end, max(1, LOGITS_AT_ONCE // logits[0].shape[-1])


def error_of(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the root mean square of what is expected."""
    scale = expected.square().mean().sqrt().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((found - expected).abs_().max() / scale)
