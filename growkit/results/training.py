"""What the proof of the training reports."""

from __future__ import annotations

from growkit.results.result import Result


class TrainingProof(Result):
    """Source and target, trained side by side in strict float64.

    Both begin with the states of their optimizers, where the target was grown with one, and else
    with the moments that the source has after a first batch.

    Attributes:
        steps: steps of AdamW that both took.
        kept: whether both learned the same; null where the law of updates does not promise it.
        reason: the finding in a sentence.
        why: what keeps the target's training from being the source's, a phrase for each.
        begun: what both began with.
        losses_source: mean loss in nats per token on the batch of each step, before it, and on one
            more batch after the last.
        losses_target: the same of the target.
        relative: largest difference of a loss against the first loss, or of a logit after the last
            step against the logit scale, whichever is larger.
        tolerance: what ``relative`` must not exceed; null where nothing is promised.
        own: the same of the source against itself, with its weights disturbed before every step by
            about as much as rounding does.
        standing_still: number of the target's parameters that have no counterpart in the source,
            and were not trained.
        control: a deliberate fault in the factors.
        control_caught: whether it was noticed, after a single step; null where nothing is promised.
        learning_rate: of the source.
        weight_decay: of the source, on every parameter.
        eps: of the source.
    """

    steps: int
    kept: bool | None
    reason: str
    why: list[str]
    begun: str
    losses_source: list[float | None]
    losses_target: list[float | None]
    relative: float | None
    tolerance: float | None
    own: float | None
    standing_still: int
    control: str
    control_caught: bool | None
    learning_rate: float
    weight_decay: float
    eps: float
