"""One run: an arm or a source with a seed and a rate.

It trains as ``growkit probe`` does (``growkit.extras.probing.harness``), on a trunk at a constant
rate with branches on which the rate decays to zero (warmup-stable-decay, arXiv 2404.06395): every
budget gets the loss of a finished training, and costs no more than its own decay.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.continual import models
from benchmarks.continual.experiment import Job
from benchmarks.continual.retrieval import MEASURES, mixed
from benchmarks.continual.text import Text
from growkit.extras.probing.harness import Look, batch_of, isolated, train, warmed, window_losses

PARTS = ("validation", "test")


@dataclass(frozen=True)
class Segment:
    """Steps of the trunk, or of a branch.

    Attributes:
        begin: number of the first step.
        end: number of the step after the last.
        point: number of the branch, whose budget ends with it; None on the trunk.
    """

    begin: int
    end: int
    point: int | None = None

    def factor(self, step: int, warmup: int) -> float:
        """The factor of all rates in a step, counted from 0."""
        left = 1.0 if self.point is None else (self.end - step) / (self.end - self.begin)
        return warmed(step, warmup) * left


def branches(points: Sequence[int], decay: float, last: int = 0) -> list[Segment]:
    """The trunk to the first branch, the branch, the trunk to the next one, and so on.

    Args:
        points: steps after which the rate has decayed, in ascending order.
        decay: share of these steps in which it decays.
        last: step to which the trunk continues after all branches.
    """
    found, at = [], 0
    for number, end in enumerate(points):
        begin = end - max(1, round(decay * end))
        if begin > at:
            found.append(Segment(at, begin))
            at = begin
        found.append(Segment(begin, end, number))
    return [*found, Segment(at, last)] if last > at else found


@dataclass
class Run:
    """A run on its way.

    Attributes:
        job: which.
        text: that it reads.
        folder: where models are made.
        source: folder of the trained source; None without one.
        device: ``cpu`` or ``cuda``.
    """

    job: Job
    text: Text
    folder: Path
    source: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        scale, arm, job = self.job.experiment.scale, self.job.arm, self.job
        with isolated(torch.device(self.device), job.seed):
            model, self.optimizer = models.begin(job, self.text, self.folder, self.source)
        self.model = model.to(self.device)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # moves its state to the device
        self.windows = self.text.windows("train", scale.context)
        self.tokens = scale.batch * scale.context
        self.flops = models.training_flops(model, scale.context)
        source = arm.source if arm else job.name
        of_source = models.source_flops(job.experiment, source)
        steps = round(job.experiment.source_tokens(source) / self.tokens)
        self.first_step, self.before, self.shares = 0, 0, [1.0]
        points, last = [steps], steps
        if arm is not None:
            extra = scale.extra * of_source
            budgets = [extra + of_source if at == "total" else at * extra for at in arm.points]
            points = [round(each / (self.flops * self.tokens)) for each in budgets]
            last, self.shares = 0, list(arm.points)
            if arm.weights == "source":
                self.first_step, self.before = steps, of_source
        segments = branches(points, scale.decay, last)
        trunk = max(each.end for each in segments if each.point is None)
        looks = range(0, trunk + 1, max(1, trunk // scale.looks))
        self.warmup = scale.warmup if arm is None or arm.warm else 0
        self.ramp = self._ramp(segments[-1].end)
        self.segments, self.looks = segments, looks

    def finish(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            The line of the run, without its key.
        """
        began = time.perf_counter()
        line: dict[str, Any] = {
            "parameters": self.model.num_parameters(),
            "flops_per_token": self.flops,
            "before_flops": self.before,
            "epochs": self._epochs(),
            "curve": [],
            "points": [],
        }
        with isolated(torch.device(self.device), self.job.seed):
            for segment in self.segments:
                self._note(line, segment, self._train(segment))
                if "diverged" in line:
                    break
        return {**line, "seconds": round(time.perf_counter() - began, 1)}

    def _note(self, line: dict[str, Any], segment: Segment, looks: Sequence[Look]) -> None:
        """Add what was measured in a segment to the line, up to a loss that is not finite."""
        for look in looks:
            tokens = look.step * self.tokens
            if look.losses is None:
                line["diverged"] = look.step + 1
            elif segment.point is None:
                line["curve"].append([tokens, look.losses])
            else:
                spent = {"tokens": tokens, "flops": tokens * self.flops}
                line["points"].append({"at": self.shares[segment.point], **spent, **look.losses})

    def _train(self, segment: Segment) -> list[Look]:
        """Take the steps of a segment; a branch leaves the trunk as it was."""
        branch, scale = segment.point is not None, self.job.experiment.scale
        states = self.model.state_dict(), self.optimizer.state_dict()
        trunk = copy.deepcopy(states) if branch else states
        found = train(
            self.model,
            self.optimizer,
            range(segment.begin, segment.end),
            {segment.end} if branch else self.looks,
            lambda step: segment.factor(step, self.warmup),
            self._batch,
            self._measured if branch else lambda: self._loss("validation", scale.look_windows),
            scale.dtype,
        )
        if branch:
            self.model.load_state_dict(trunk[0])
            self.optimizer.load_state_dict(trunk[1])
        return found

    def _batch(self, step: int) -> Tensor:
        self.ramp(step)
        size, seed = self.job.experiment.scale.batch, self.job.seed
        first = (self.first_step + step) * size
        batch = batch_of(self.windows, seed, first, size)
        if "needles" in self.job.experiment.measures:
            batch = mixed(batch, self.text, seed, first)
        return batch

    def _measured(self) -> dict[str, float] | None:
        """What is measured where a rate has decayed; None where a loss is not finite."""
        scale = self.job.experiment.scale
        found: dict[str, Any] = {part: self._loss(part, scale.windows) for part in PARTS}
        for name in self.job.experiment.measures:
            found |= MEASURES[name](self.model, self.text, scale.context)
        return None if None in found.values() else found

    def _loss(self, part: str, windows: int) -> float | None:
        """Nats per token on held-out windows; None if that is not finite."""
        scale = self.job.experiment.scale
        held_out = self.text.held_out(part, windows, scale.context)
        losses = window_losses(self.model, held_out, 32, scale.dtype)
        return None if losses is None else fmean(losses)

    def _ramp(self, steps: int) -> Callable[[int], None]:
        """Sets the gates of DINT before a step: to 1 in a straight line; then they learn."""
        arm = self.job.arm
        if arm is None or not arm.ramp:
            return lambda _: None
        ramp = max(1, round(arm.ramp * steps / float(arm.points[-1])))
        named = self.model.named_parameters()
        gates = [
            (gate, float(gate.detach()))
            for name, gate in named
            if name.endswith("self_attn.gamma_gate")
        ]
        assert gates

        def set_gates(step: int) -> None:
            for gate, start in gates:
                gate.requires_grad_(step >= ramp)
                if step <= ramp:
                    with torch.no_grad():
                        gate.fill_(start + step / ramp * (1 - start))

        return set_gates

    def _epochs(self) -> float:
        """How often the text was read, with what the source read of it."""
        last = max(each.end for each in self.segments)
        read = (self.first_step + last) * self.tokens
        return round(read / len(self.text.parts["train"]), 3)
