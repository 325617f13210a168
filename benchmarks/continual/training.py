"""One run: an arm or a source with a seed and a rate, from its beginning to its last point.

A checkpoint holds all that the rest follows from (weights, optimizer, random numbers, the step,
from which the place in the text follows, and what was measured so far), so that a run that was
killed at any moment ends with the same numbers, to the last bit on a CPU with as many threads.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

from benchmarks.continual import models
from benchmarks.continual.compute import training_flops
from benchmarks.continual.experiment import Arm, Experiment, Scale
from benchmarks.continual.measures import MEASURES
from benchmarks.continual.needles import mixed
from benchmarks.continual.schedule import Segment, rate_factor, segments
from benchmarks.continual.text import Text
from growkit.training import GammaRamp

STATE = "state.pt"
Watch = Callable[[str], None]
"""Is told what happens, for tests that end a run there."""


@dataclass(frozen=True)
class Job:
    """Which run.

    Attributes:
        experiment: with the arm.
        name: of the arm or the source.
        seed: of it.
        rate: its learning rate.
    """

    experiment: Experiment
    name: str
    seed: int
    rate: float

    @property
    def arm(self) -> Arm | None:
        """None for a source."""
        return self.experiment.arms.get(self.name)


@dataclass
class Held:
    """What a training is about to change: weights, moments and random numbers."""

    model: Any
    optimizer: torch.optim.AdamW

    def state(self) -> dict[str, Any]:
        """As it is now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load(self, state: dict[str, Any]) -> None:
        """As it was then."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"].cpu())


class Training:
    """A run on its way.

    Args:
        job: which.
        text: that it reads.
        work: folder of the run.
        source: folder of the trained source; None where there is none.
        device: ``cpu`` or ``cuda``.
        save_every: seconds between checkpoints.
        watch: see ``Watch``.
    """

    def __init__(
        self,
        job: Job,
        text: Text,
        work: Path,
        source: Path | None,
        device: str = "cpu",
        save_every: float = 60.0,
        watch: Watch = lambda _: None,
    ) -> None:
        self.job, self.text, self.work, self.device = job, text, work, device
        self.scale: Scale = job.experiment.scale
        self.save_every, self.watch = save_every, watch
        beginning = self._beginning(source)
        model = beginning.model.to(device).train()
        self.rates = [group["lr"] for group in beginning.groups]
        self.held = Held(model, models.adamw(beginning, self.scale))
        self._plan()
        self.ramp = self._ramp()
        self.segment = self.step = 0
        self.trunk: dict[str, Any] | None = None
        self.measured: dict[str, Any] = {"curve": [], "points": [], "seconds": 0.0}
        self._resume()

    def _beginning(self, source: Path | None) -> models.Beginning:
        job = self.job
        if job.arm is None:
            wanted = job.experiment.sources[job.name]
            model = models.drawn(models.config_of(self.scale, wanted.model, {}), job.seed)
            return models.Beginning(model, models.plain_groups(model, self.scale, job.rate), None)
        assert source is not None or job.arm.weights == "new"
        return models.begin(
            job.experiment, job.arm, self.text, self.work, source or Path(), job.seed, job.rate
        )

    def _plan(self) -> None:
        """Budgets as steps, and where in the text the training begins."""
        scale, arm, model = self.scale, self.job.arm, self.held.model
        self.tokens = scale.batch * scale.context
        self.flops = training_flops(model, scale.context)
        self.parameters = sum(each.numel() for each in model.parameters())
        source = self.job.experiment.sources[arm.source if arm else self.job.name]
        source_flops = source_compute(self.job.experiment, source.name)
        source_steps = round(scale.source_tokens / self.tokens)
        self.first_step, self.before = 0, 0
        if arm is None:
            steps, handed_on = [source_steps], source_steps
            self.shares: list[float | str] = [1.0]
        else:
            extra = scale.extra * source_flops
            of = {"total": extra + source_flops}
            budgets = [of[each] if each in of else float(each) * extra for each in arm.points]
            steps = [round(each / (self.flops * self.tokens)) for each in budgets]
            handed_on, self.shares = 0, list(arm.points)
            if arm.weights == "source":
                self.first_step, self.before = source_steps, source_flops
        self.segments = segments(steps, scale.decay, handed_on)
        trunk = max(each.end for each in self.segments if not each.decays)
        self.look_every = max(1, trunk // scale.looks)
        self.warmup = scale.warmup if arm is None or arm.warm else 0

    def _ramp(self) -> Callable[[int], None]:
        """What sets the gates of DINT before a step."""
        arm = self.job.arm
        if arm is None or not arm.ramp:
            return lambda _: None
        steps = round(arm.ramp * self.segments[-1].end / float(arm.points[-1]))
        ramp, control = GammaRamp(max(1, steps)), TrainerControl()
        arguments = TrainingArguments(str(self.work), report_to=[], use_cpu=True)
        model = self.held.model
        ramp.on_train_begin(arguments, TrainerState(), control, model=model)
        return lambda step: ramp.on_step_begin(
            arguments, TrainerState(global_step=step), control, model=model
        )

    def _resume(self) -> None:
        file = self.work / STATE
        if file.is_file():
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.held.load(state["held"])
            self.segment, self.step = state["segment"], state["step"]
            self.trunk, self.measured = state["trunk"], state["measured"]

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        state = {
            "held": self.held.state(),
            "segment": self.segment,
            "step": self.step,
            "trunk": self.trunk,
            "measured": self.measured,
        }
        unfinished = self.work / f"{STATE}.new"
        torch.save(state, unfinished)
        self.watch("written")
        os.replace(unfinished, self.work / STATE)
        self.watch("saved")

    def run(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            What is known of the run, without its key.
        """
        began, spent = time.perf_counter(), self.measured["seconds"]
        saved = began
        if not self.measured["curve"]:
            self._look()
        while self.segment < len(self.segments) and not self.diverged:
            segment = self.segments[self.segment]
            if segment.decays and self.step == segment.begin:
                self.trunk = copy.deepcopy(self.held.state())
            while self.step < segment.end and not self.diverged:
                self._step(segment)
                now = time.perf_counter()
                if now - saved >= self.save_every:
                    self.measured["seconds"] = spent + now - began
                    self.save()
                    saved = now
                self.watch("step")
            if not self.diverged:
                self._finish(segment)
                self.measured["seconds"] = spent + time.perf_counter() - began
                self.save()
                saved = time.perf_counter()
        return self._result()

    @property
    def diverged(self) -> bool:
        """Whether a loss was no number."""
        return "diverged" in self.measured

    def _step(self, segment: Segment) -> None:
        scale = self.scale
        factor = rate_factor(segment, self.step, self.warmup)
        for group, rate in zip(self.held.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.ramp(self.step)
        first = (self.first_step + self.step) * scale.batch
        batch = self.text.batch(self.job.seed, first, scale.batch, scale.context)
        if "needles" in self.job.experiment.measures:
            batch = mixed(batch, self.text, self.job.seed, first)
        batch = batch.to(self.device)
        with self._computed():
            loss = self.held.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.held.optimizer.step()
        self.held.optimizer.zero_grad()
        self.step += 1
        if not math.isfinite(float(loss.detach())):
            self.measured["diverged"] = self.step
        elif not segment.decays and self.step % self.look_every == 0:
            self._look()

    def _finish(self, segment: Segment) -> None:
        """Measure where the rate has decayed, and go back to the trunk."""
        if segment.point is not None:
            point = {
                "at": self.shares[segment.point],
                "tokens": self.step * self.tokens,
                "flops": self.step * self.tokens * self.flops,
                **{part: self._loss(part, self.scale.windows) for part in ("validation", "test")},
            }
            for name in self.job.experiment.measures:
                point |= MEASURES[name](self.held.model, self.text, self.scale.context, self.device)
            self.measured["points"].append(point)
            assert self.trunk is not None
            self.held.load(self.trunk)
            self.trunk, self.step = None, segment.begin
        self.segment += 1

    def _look(self) -> None:
        loss = self._loss("validation", self.scale.look_windows)
        self.measured["curve"].append([self.step * self.tokens, loss])

    def _loss(self, part: str, windows: int) -> float:
        """Nats per token on held-out windows."""
        held_out = self.text.held_out(part, windows, self.scale.context)
        return loss_on(self.held.model, held_out, self.device, self._computed)

    def _computed(self) -> Any:
        if self.scale.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, self.scale.dtype))

    def _result(self) -> dict[str, Any]:
        measured = dict(self.measured)
        return {
            "parameters": self.parameters,
            "flops_per_token": self.flops,
            "before_flops": self.before,
            "epochs": round(self._epochs(), 3),
            **measured,
            "seconds": round(measured["seconds"], 1),
        }

    def _epochs(self) -> float:
        """How often the text was read, with what the source read of it."""
        last = max(each.end for each in self.segments)
        return (self.first_step + last) * self.tokens / len(self.text.parts["train"])


@torch.no_grad()
def loss_on(model: Any, windows: Tensor, device: str, computed: Callable[[], Any]) -> float:
    """Nats per token, without dropout.

    Args:
        model: as it trains.
        windows: [windows, context].
        device: that it is on.
        computed: a context in which it computes.
    """
    model.eval()
    total = 0.0
    for batch in windows.split(32):
        with computed():
            loss = model(input_ids=batch.to(device), labels=batch.to(device)).loss
        total += float(loss) * len(batch)
    model.train()
    return total / len(windows)


def source_compute(experiment: Experiment, name: str) -> int:
    """FLOPs that a source is trained with."""
    scale = experiment.scale
    config = models.config_of(scale, experiment.sources[name].model, {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return scale.source_tokens * training_flops(model, scale.context)
