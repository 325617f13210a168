"""How far apart two models' logits are, summed up window by window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.proof import Measured


@dataclass
class Distance:
    """Sums over all tokens seen so far; all in float64."""

    largest: float = 0.0
    absolute: float = 0.0
    squared_source: float = 0.0
    elements: int = 0
    kl: float = 0.0
    agreeing: int = 0
    tokens: int = 0
    loss_source: float = 0.0
    loss_target: float = 0.0
    predictions: int = 0

    def add(self, source: Tensor, target: Tensor, ids: Tensor) -> None:
        """Take one sequence into account.

        Args:
            source: logits of the source, [tokens, vocabulary].
            target: logits of the target, the same shape.
            ids: the tokens themselves, [tokens]; each is predicted by the logits before it.
        """
        source, target = source.double(), target.double()
        ids = ids.to(source.device)
        difference = (source - target).abs()
        # torch's maximum keeps a NaN, Python's may drop it; and a NaN must never pass.
        so_far = difference.new_tensor(self.largest)
        self.largest = float(torch.maximum(difference.max(), so_far))
        self.absolute += float(difference.sum())
        self.squared_source += float(source.square().sum())
        self.elements += source.numel()
        log_p, log_q = source.log_softmax(-1), target.log_softmax(-1)
        self.kl += float((log_p.exp() * (log_p - log_q)).sum())
        self.agreeing += int((source.argmax(-1) == target.argmax(-1)).sum())
        self.tokens += len(ids)
        self.loss_source -= float(log_p[:-1].gather(-1, ids[1:, None]).sum())
        self.loss_target -= float(log_q[:-1].gather(-1, ids[1:, None]).sum())
        self.predictions += len(ids) - 1

    @property
    def scale(self) -> float:
        """Root mean square of the source's logits."""
        return math.sqrt(self.squared_source / self.elements)

    @property
    def relative(self) -> float:
        """Largest difference against the scale; NaN where a logit is not finite."""
        return self.largest / self.scale if self.scale else self.largest

    def measured(self, dtype: str, device: str, tolerance: float | None) -> Measured:
        """The figures, as they are reported."""
        return Measured(
            dtype=dtype,
            device=device,
            max_abs_logit_diff=finite(self.largest),
            mean_abs_logit_diff=finite(self.absolute / self.elements),
            logit_scale=finite(self.scale),
            relative=finite(self.relative),
            tolerance=tolerance,
            kl_nats_per_token=finite(max(self.kl, 0.0) / self.tokens),  # never less, but rounding
            top1_agreement=self.agreeing / self.tokens,
        )


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
