"""The training harness: one run of a model, with every loss that is measured on its way.

A probe and the experiments in ``benchmarks/continual`` train with it; they differ in their arms,
schedules and measures, which are data. A schedule has a trunk at a constant rate, and branches from
it on which the rate decays to zero (warmup-stable-decay, arXiv 2404.06395): every budget gets the
loss of a finished training, and costs no more than its own decay. A probe has the trunk alone.
"""

from __future__ import annotations

import copy
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
        segments: in their order.
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


@dataclass(frozen=True)
class Look:
    """A measurement.

    Attributes:
        step: number of steps before it.
        losses: what was measured: in a probe, nats per token of every held-out window. None where
            a loss is not finite.
        point: number of the branch that it ends; None on the trunk.
    """

    step: int
    losses: Any
    point: int | None = None


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    batch: Callable[[int], Tensor],
    measure: Callable[[int | None], Any],
    dtype: str = "float32",
    advance: Advance = nothing,
) -> list[Look]:
    """Train to the end of a schedule, or to a loss that is not finite.

    Args:
        model: in float32, on its device.
        optimizer: whose groups have their full rates.
        schedule: all steps.
        batch: the windows of a step, [size, length]; called once, just before the step.
        measure: called with the number of a branch at its end, or None on the trunk; returns None
            where a loss is not finite, which ends the run.
        dtype: torch name of the dtype that is computed in.
        advance: called with 1 after every step.

    Returns:
        All measurements; the last one has no losses if one was not finite.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    looks: list[Look] = []
    generators = [model.device] if model.device.type == "cuda" else []

    def look(step: int, point: int | None = None) -> bool:
        model.eval()
        with torch.no_grad():
            looks.append(Look(step, measure(point), point))
        return looks[-1].losses is not None

    def take(segment: Segment, step: int) -> bool:
        factor = schedule.factor(segment, step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        if not _step(model, optimizer, batch(step), dtype):
            looks.append(Look(step, None))
            return False
        advance(1)
        on_trunk = segment.point is None and step + 1 in schedule.looks
        ends = segment.point is not None and step + 1 == segment.end
        return not (on_trunk or ends) or look(step + 1, segment.point)

    if 0 in schedule.looks and not look(0):
        return looks
    for segment in schedule.segments:
        trunk = None
        if segment.point is not None:
            trunk = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with torch.random.fork_rng(generators, enabled=trunk is not None):
            if not all(take(segment, step) for step in range(segment.begin, segment.end)):
                return looks
        if trunk is not None:
            model.load_state_dict(trunk[0])
            optimizer.load_state_dict(trunk[1])
    return looks


def _step(model: Any, optimizer: torch.optim.Optimizer, windows: Tensor, dtype: str) -> bool:
    """Take a step, unless its loss is not finite; whether it was taken."""
    ids = windows.to(model.device)
    model.train()
    with computing(model.device, dtype):
        loss = model(ids, labels=ids, use_cache=False).loss
    if not loss.isfinite():
        return False
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return True


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
