"""The training harness: one run of a model, with every loss that is measured on its way.

A probe and the experiments in ``benchmarks/continual`` train with it; they differ in their arms,
schedules and measures, which are data. A schedule has a trunk at a constant rate, and branches from
it on which the rate decays to zero (warmup-stable-decay, arXiv 2404.06395): every budget gets the
loss of a finished training, and costs no more than its own decay. A probe has the trunk alone.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from growkit.base.progress import Advance, nothing
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.oracle import load_model, quiet
from growkit.engine.strict import choose_kernels, reproducible
from growkit.optimizer.parameters import decayed
from growkit.training.groups import param_groups

BETAS, EPS = (0.9, 0.95), 1e-8
"""Of AdamW, in a probe."""


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


@dataclass(frozen=True)
class Schedule:
    """All steps of a run.

    Attributes:
        segments: in their order; see ``branches``.
        looks: numbers of steps on the trunk after which the loss is measured.
        warmup: steps in which the rate rises in a straight line.
    """

    segments: Sequence[Segment]
    looks: Collection[int]
    warmup: int = 0

    def factor(self, segment: Segment, step: int) -> float:
        """The factor of all rates in a step, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if segment.point is None:
            return warm
        return warm * ((segment.end - step) / (segment.end - segment.begin))


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


@dataclass(frozen=True)
class Look:
    """A measurement.

    Attributes:
        step: number of steps before it.
        losses: what ``Training.measure`` returned: in a probe, nats per token of every held-out
            window. None where a loss is not finite.
        point: number of the branch that it ends; None on the trunk.
    """

    step: int
    losses: Any
    point: int | None = None


@dataclass
class Training:
    """A run, which continues from its checkpoint if it has one.

    A checkpoint holds all that the rest depends on, so that a run that was killed ends with the
    same numbers (on a CPU to the last bit, with the same number of threads).

    Attributes:
        model: in float32, on its device.
        optimizer: whose groups have their full rates.
        schedule: all steps.
        batch: the windows of a step, [size, length]; called once, just before the step.
        measure: called with the number of a branch at its end, or None on the trunk; returns None
            where a loss is not finite, which ends the run.
        dtype: torch name of the dtype that is computed in.
        file: the checkpoint; None for none.
        save_every: seconds between checkpoints; one is also written after every segment.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batch: Callable[[int], Tensor]
    measure: Callable[[int | None], Any]
    dtype: str = "float32"
    file: Path | None = None
    save_every: float = float("inf")

    def __post_init__(self) -> None:
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.segment = self.step = 0
        self.trunk: dict[str, Any] | None = None
        self.looks: list[Look] = []
        self.seconds = 0.0
        if self.file and self.file.is_file():
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            self._load(state["now"])
            self.segment, self.step, self.trunk = state["segment"], state["step"], state["trunk"]
            self.looks, self.seconds = [Look(*each) for each in state["looks"]], state["seconds"]

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        return bool(self.looks) and self.looks[-1].losses is None

    def run(self, advance: Advance = nothing) -> list[Look]:
        """Train to the end, or to a loss that is not finite.

        Args:
            advance: called with 1 after every step.
        """
        self._saved = time.perf_counter()
        if not self.looks and 0 in self.schedule.looks:
            self._look()
        while self.segment < len(self.schedule.segments) and not self.diverged:
            segment = self.schedule.segments[self.segment]
            if segment.point is not None and self.step == segment.begin:
                self.trunk = copy.deepcopy(self._now())
            while self.step < segment.end and not self.diverged:
                self._step(segment, advance)
                if time.perf_counter() - self._saved >= self.save_every:
                    self._save()
            if self.diverged:
                break
            if segment.point is not None:
                self._look(segment.point)
                assert self.trunk is not None
                self._load(self.trunk)
                self.trunk, self.step = None, segment.begin
            self.segment += 1
            self._save()
        return self.looks

    def _step(self, segment: Segment, advance: Advance) -> None:
        factor = self.schedule.factor(segment, self.step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        batch = self.batch(self.step).to(self.model.device)
        self.model.train()
        with computing(self.model.device, self.dtype):
            loss = self.model(batch, labels=batch, use_cache=False).loss
        if not loss.isfinite():
            self.looks.append(Look(self.step, None))
            return
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        advance(1)
        if segment.point is None and self.step in self.schedule.looks:
            self._look()

    def _look(self, point: int | None = None) -> None:
        self.model.eval()
        with torch.no_grad():
            self.looks.append(Look(self.step, self.measure(point), point))

    def _now(self) -> dict[str, Any]:
        """Everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def _save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        now = time.perf_counter()
        self.seconds, self._saved = self.seconds + now - self._saved, now
        if self.file is None:
            return
        looks = [[each.step, each.losses, each.point] for each in self.looks]
        state = {"segment": self.segment, "step": self.step, "trunk": self.trunk, "looks": looks}
        unfinished = self.file.with_name(f"{self.file.name}.new")
        torch.save({**state, "now": self._now(), "seconds": self.seconds}, unfinished)
        os.replace(unfinished, self.file)


def batch_of(windows: Tensor, seed: int, first: int, count: int) -> Tensor:
    """Windows to train on, [count, length], which depend on the seed and their numbers alone.

    Every window is taken once before any is taken twice.

    Args:
        windows: all of a text, [windows, length].
        seed: of their order.
        first: number of the first one, counted from the beginning of a training.
        count: how many.
    """
    every = len(windows)
    numbers = range(first, first + count)
    return torch.stack([windows[_order(seed, n // every, every)[n % every]] for n in numbers])


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    return torch.randperm(count, generator=generator)


def window_losses(model: Any, windows: Tensor, size: int, dtype: str) -> list[float] | None:
    """The loss of every window in nats per token; None if one is not finite.

    Args:
        model: as it trains.
        windows: [windows, length].
        size: how many are computed at once.
        dtype: torch name of the dtype that is computed in.
    """
    losses: list[float] = []
    for part in windows.split(size):
        ids = part.to(model.device)
        with torch.no_grad(), computing(model.device, dtype):
            logits: Tensor = model(ids, use_cache=False).logits[:, :-1].float()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        losses += each.double().mean(1).tolist()
    return losses if all(abs(each) < float("inf") for each in losses) else None  # none is a NaN


def computing(device: torch.device, dtype: str) -> Any:
    """Let forward passes compute in a dtype."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


@contextmanager
def isolated(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers depend on the seed, and those of the caller are not touched."""
    with (
        reproducible(device),
        torch.random.fork_rng([] if device.type == "cpu" else [device]),
        quiet(),
    ):
        choose_kernels()
        torch.manual_seed(seed)
        yield


def groups_of(
    model: nn.Module,
    law: Path | None,
    lr: float,
    weight_decay: float,
    eps: float = EPS,
    decays: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Groups of AdamW, by the law of updates or with one rate for all parameters.

    Args:
        model: whose parameters they are.
        law: folder that growkit wrote, with the factors of every rate; None for one rate.
        lr: the rate of the source.
        weight_decay: of the parameters that decay.
        eps: of AdamW.
        decays: whether a parameter decays; without, transformers' Trainer decides.
    """
    if law is not None:
        return param_groups(model, law, lr=lr, weight_decay=weight_decay, eps=eps, decays=decays)
    names = decayed(model) if decays is None else frozenset()
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        loses = decays(name, parameter) if decays else name in names
        parts[not loses].append(parameter)
    return [
        {"params": parameters, "lr": lr, "eps": eps, "weight_decay": decay}
        for parameters, decay in zip(parts, (weight_decay, 0.0), strict=True)
        if parameters
    ]


def flops_of(stored: Path | Checkpoint, window: Tensor, device: torch.device) -> int:
    """Floating-point operations of training on a window, [tokens], as torch counts them."""
    model: Any = load_model(stored, torch.float32, device, None)  # as it is trained
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # products of groups are not counted
    ids = window[None].to(device)
    # Fused attention is not counted on every device, and its kernels by other rules.
    math = sdpa_kernel(SDPBackend.MATH)
    with quiet(), math, FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return int(counter.get_total_flops())
