"""The section on training."""

from growkit.results.proof_result import Section


class TrainingSection(Section):
    """Source and target trained side by side in strict float64; if requested.

    If the target was grown together with an optimizer's state, both resume from their states.
    Otherwise both start with the source's moments after a first batch.

    Attributes:
        steps: number of AdamW steps of each.
        why: the reasons why the target's training is not the source's, one phrase each.
        begun: the optimizer's state at the start.
        losses_source: mean loss in nats per token on the batch of each step, before the step, and
            on one more batch after the last step.
        losses_target: the same losses of the target.
        relative: the larger of two errors: the largest loss difference relative to the first loss,
            and the largest logit difference after the last step relative to the logit scale.
        tolerance: upper limit of ``relative``; null if nothing is promised.
        own: the same error of the source compared with itself, with its weights disturbed before
            every step by about the size of rounding.
        standing_still: number of the target's parameters that have no counterpart in the source
            and were not trained.
        control: a deliberate fault in the factors.
        control_caught: whether the fault was detected after a single step; null if nothing is
            promised.
        learning_rate: learning rate of the source.
        weight_decay: weight decay of the source, on every parameter.
        eps: eps of the source's AdamW.
    """

    steps: int
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


SECTION = TrainingSection
