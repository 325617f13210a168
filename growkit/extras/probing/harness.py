"""The training harness: training steps with measurements of the loss.

A probe and the experiments in ``benchmarks/continual`` share it; they differ in their arms, rates
and measurements.
"""

from collections.abc import Callable, Collection, Iterator
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
from growkit.engine.device import reproducible
from growkit.engine.strict import choose_kernels
from growkit.engine.transformers_class import load_model, quiet
from growkit.engine.transformers_internals import one_expert_at_a_time
from growkit.model.checkpoint.reading import Checkpoint


@dataclass(frozen=True)
class Look:
    """A measurement.

    Attributes:
        step: number of steps before the measurement.
        losses: the measured losses: in a probe, nats per token of every held-out window. None if a
            loss is not finite.
    """

    step: int
    losses: Any


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    looks: Collection[int],
    factor: Callable[[int], float],
    batch: Callable[[int], Tensor],
    measure: Callable[[], Any],
    dtype: str = "float32",
    advance: Advance = nothing,
) -> list[Look]:
    """Train for some steps; stop at a loss that is not finite.

    Args:
        model: the model in float32, on its device.
        optimizer: the optimizer, with full rates in its groups.
        steps: numbers of the steps.
        looks: numbers of steps after which the loss is measured; 0 measures before the first.
        factor: maps a step to the factor of all rates.
        batch: maps a step to its windows, [size, length]; called once, just before the step.
        measure: measures the losses; returns None, which ends the run, if one is not finite.
        dtype: torch name of the dtype of computation.
        advance: called with 1 after every step.

    Returns:
        All measurements; the last one has no losses if one was not finite.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    measured: list[Look] = []

    def set_rates(factor: float) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor

    def look(step: int) -> bool:
        model.eval()
        with torch.no_grad():
            measured.append(Look(step, measure()))
        return measured[-1].losses is not None

    if steps.start == 0 and 0 in looks and not look(0):
        return measured
    for step in steps:
        set_rates(factor(step))
        if not _step(model, optimizer, batch(step), dtype):
            return [*measured, Look(step, None)]
        advance(1)
        if step + 1 in looks and not look(step + 1):
            return measured
    set_rates(1.0)
    return measured


def warmed(step: int, warmup: int) -> float:
    """The warmup factor of all rates: it rises linearly to 1 and stays there.

    Args:
        step: number of the step, from 0.
        warmup: number of warmup steps.
    """
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _step(model: Any, optimizer: torch.optim.Optimizer, windows: Tensor, dtype: str) -> bool:
    """Take a step if its loss is finite; return whether it was taken."""
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
    """Select training windows, [count, length], by the seed and their numbers alone.

    Every window is taken once before any is taken twice.

    Args:
        windows: all windows of a text, [windows, length].
        seed: seed of their order.
        first: number of the first window, counted from the start of the training.
        count: number of windows.
    """
    every = len(windows)
    numbers = torch.arange(first, first + count)
    turns = range(first // every, (first + count - 1) // every + 1)
    orders = [
        _order(seed, turn, every)[numbers[numbers // every == turn] % every] for turn in turns
    ]
    return windows[torch.cat(orders)]


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + turn))


def window_losses(model: Any, windows: Tensor, size: int, dtype: str) -> list[float] | None:
    """Measure the loss of every window in nats per token; None if one is not finite.

    Args:
        model: the model in training.
        windows: [windows, length].
        size: number of windows per forward pass.
        dtype: torch name of the dtype of computation.
    """
    losses: list[float] = []
    for part in windows.split(size):
        ids = part.to(model.device)
        with torch.no_grad(), computing(model.device, dtype):
            logits: Tensor = model(ids, use_cache=False).logits[:, :-1].float()
        token_losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        losses += token_losses.double().mean(1).tolist()
    return losses if all(abs(loss) < float("inf") for loss in losses) else None  # none is a NaN


def computing(device: torch.device, dtype: str) -> Any:
    """A context in which forward passes compute in a dtype."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


@contextmanager
def isolated(device: torch.device, seed: int) -> Iterator[None]:
    """A context with random numbers from the seed; the caller's generators are unaffected."""
    with (
        reproducible(device),
        torch.random.fork_rng([] if device.type == "cpu" else [device]),
        quiet(),
    ):
        choose_kernels()
        torch.manual_seed(seed)
        yield


def flops_of(stored: Path | Checkpoint, window: Tensor, device: torch.device) -> int:
    """Count the floating-point operations of training on a window, [tokens], with torch."""
    model: Any = load_model(stored, torch.float32, device, None)  # as it is trained
    one_expert_at_a_time(model)  # products of groups are not counted
    ids = window[None].to(device)
    # Fused attention is not counted on every device, and its kernels are counted differently.
    math = sdpa_kernel(SDPBackend.MATH)
    with quiet(), math, FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return int(counter.get_total_flops())
