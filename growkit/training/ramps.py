"""What changes during training: the gate of a DINT, and a rate that is warmed up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from growkit.base.errors import InputError


class GammaRamp(TrainerCallback):
    """Ramps the gate of a gated DINT from where it is to 1, for ``Trainer(callbacks=[...])``.

    γ = g · λ (``growkit.conversions.dint``): at g = 0 the model is DIFF, at g = 1 it is the DINT of
    arXiv 2501.17486. Without a ramp the gates learn by themselves; with it they are set before each
    step, in a straight line, and are not trained until the ramp is over.

    Args:
        steps: optimizer steps from the present gates to 1, at least 1.

    Raises:
        InputError: there are too few steps, or (when training begins) the model has no gates.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise InputError(f"a ramp of {steps} steps is none; give at least 1")
        self.steps = steps
        self._gates: list[tuple[torch.nn.Parameter, float]] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find the gates, and take them out of training."""
        parameters = kwargs["model"].named_parameters()
        gates = [gate for name, gate in parameters if name.endswith("self_attn.gamma_gate")]
        self._gates = [(gate, float(gate.detach())) for gate in gates]
        if not self._gates:
            raise InputError("the model has no gate to ramp; convert it to dint, gated, first")

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the gates for this step."""
        done = min(1.0, state.global_step / self.steps)
        for gate, start in self._gates:
            gate.requires_grad_(done == 1.0)
            if state.global_step <= self.steps:
                with torch.no_grad():
                    gate.fill_(start + done * (1 - start))


def rewarming(
    steps: int, *, start: float = 0.0, then: Callable[[int], float] | None = None
) -> Callable[[int], float]:
    """What ``torch.optim.lr_scheduler.LambdaLR`` multiplies rates with, to continue a training.

    Moments that begin anew while the optimizer keeps its step count are not corrected for their
    beginning: Adam's first update is (1 - β1) / √(1 - β2) times as long as it would be, 3.2 times
    with 0.9 and 0.999. A low rate keeps these updates small until the moments are known.

    Args:
        steps: from the low rate to the full one, in a straight line; the last of them is full.
        start: the share of the rate that the line comes from, before the first step.
        then: the factor of the schedule that continues, by step; it always applies. 1 without.

    Returns:
        The factor of a step, counted from 0.

    Raises:
        InputError: there are too few steps, or the rate would begin below 0 or above 1.
    """
    if steps < 1:
        raise InputError(f"re-warming for {steps} steps is none; give at least 1")
    if not 0 <= start <= 1:
        raise InputError(f"re-warming cannot begin at {start:g} of the rate; give 0 to 1")

    def factor(step: int) -> float:
        warm = start + (1 - start) * min(1.0, (step + 1) / steps)
        return warm * (then(step) if then else 1.0)

    return factor
