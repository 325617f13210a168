"""The ramp of a gated DINT: the integral is let in while the model trains."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Find the gates, and take them out of training."""
        parameters = kwargs["model"].named_parameters()
        self._gates = [
            (gate, float(gate.detach()))
            for name, gate in parameters
            if name.endswith("self_attn.gamma_gate")
        ]
        if not self._gates:
            raise InputError("the model has no gate to ramp; convert it to dint, gated, first")

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the gates for this step."""
        done = min(1.0, state.global_step / self.steps)
        for gate, start in self._gates:
            gate.requires_grad_(done == 1.0)
            if state.global_step <= self.steps:
                with torch.no_grad():
                    gate.fill_(start + done * (1 - start))
