"""Results of inference: a family, with the growths that were tried."""

from typing import Any

from growkit.base.limits import within
from growkit.results import Result

EXACT = 1e-10
"""Largest relative error of equal logits: far above float64 rounding, far below any fault."""


class Trial(Result):
    """A trial growth of a small random model of a class.

    Attributes:
        axis: the grown axis.
        options: options of the growth.
        error: largest logit difference in strict float64, relative to the logit scale; null if no
            such model can be made.
        why: the reason why there is no such model; null if there is one.
    """

    axis: str
    options: dict[str, str]
    error: float | None
    why: str | None

    @property
    def exact(self) -> bool:
        """Whether the grown model computes the same function."""
        return within(self["error"], EXACT)

    @property
    def wrong(self) -> bool:
        """Whether the grown model computes another function."""
        return self["error"] is not None and not self.exact


class Inference(Result):
    """A family that was inferred, as ``growkit inspect --infer --json`` prints it.

    Attributes:
        model_class: name of the transformers class.
        family: the description, as ``growkit.grow`` takes it.
        trials: trial growths of small random models with this description.
        tried: number of descriptions that were tried.
        sure: whether every trial growth computes the same function.
        yaml: the description as a file, with what was tried in comments.
    """

    model_class: str
    family: dict[str, Any]
    trials: list[Trial]
    tried: int
    sure: bool
    yaml: str


PRINTED = (Inference,)
