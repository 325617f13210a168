"""One training of a probe, and the losses on held-out windows on its way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.oracle import load, quiet
from growkit.engine.strict import choose_kernels, reproducible
from growkit.probing.settings import ProbeSettings
from growkit.probing.text import Data
from growkit.training.decay import decayed
from growkit.training.groups import param_groups
from growkit.training.warming import rewarming


@dataclass(frozen=True)
class Look:
    """The losses after some steps.

    Attributes:
        step: how many.
        losses: in nats per token, of every held-out window; None where one is not finite.
    """

    step: int
    losses: list[float] | None


BETAS, EPS = (0.9, 0.95), 1e-8
"""Of AdamW."""


@dataclass(frozen=True)
class Trainee:
    """A model that is trained.

    Attributes:
        name: what it is called.
        stored: where it lies.
        law: the folder that says what its rates are multiplied by; None for the source, whose
            rates are those that are given.
    """

    name: str
    stored: Path | Checkpoint
    law: Path | None


def train(
    trainee: Trainee,
    data: Data,
    settings: ProbeSettings,
    lr: float,
    seed: int,
    looks: Collection[int],
    device: torch.device,
    advance: Callable[[int], None],
) -> list[Look]:
    """Train a model; it ends early where a loss is not finite.

    Args:
        trainee: the model.
        data: what it learns from, and is asked.
        settings: how it is trained.
        lr: the rate of the source.
        seed: of the order of the windows.
        looks: after how many steps the loss on held-out windows is measured.
        device: where.
        advance: called with 1 after every step.

    Raises:
        InputError: it cannot be trained, or there is no room for it.
    """
    with no_failure(trainee.name, device), _by_itself(device, seed):
        model: Any = load(trainee.stored, torch.float32, device, None)
        groups = _groups(model, trainee.law, lr, settings.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS)
        warmup = rewarming(settings.warmup) if settings.warmup else lambda step: 1.0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
        dtype = computed_in(settings, device)
        found: list[Look] = []
        for step in range(settings.steps + 1):
            if step in looks:
                found.append(Look(step, _held_out(model, data, settings.batch, device, dtype)))
                if found[-1].losses is None:
                    break
            if step == settings.steps:
                break
            batch = data.batch(seed, step, settings.batch).to(device)
            model.train()
            with _computing(device, dtype):
                loss = model(batch, labels=batch, use_cache=False).loss
            if not loss.isfinite():
                found.append(Look(step, None))
                break
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            advance(1)
        return found


@contextmanager
def no_failure(name: str, device: torch.device) -> Iterator[None]:
    """What goes wrong in here is that a model cannot be trained.

    Raises:
        InputError: says why, in place of any error.
    """
    failure = f"{name} cannot be trained"
    try:
        with foreign(failure, "leave it out, and try its output by itself"):
            yield
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            f"{failure}: {device} has no room for it; give a smaller --batch or --length"
        ) from error


@contextmanager
def _by_itself(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers follow from the seed, and those of others are left alone."""
    with (
        reproducible(device),
        torch.random.fork_rng([] if device.type == "cpu" else [device]),
        quiet(),
    ):
        choose_kernels()
        torch.manual_seed(seed)
        yield


def _groups(model: nn.Module, law: Path | None, lr: float, decay: float) -> list[dict[str, Any]]:
    """By the law of updates; those of the source as Trainer makes them."""
    if law is not None:
        return param_groups(model, law, lr=lr, weight_decay=decay, eps=EPS)
    lose = decayed(model)
    every = list(model.named_parameters())
    parted = [[each for name, each in every if (name in lose) is loses] for loses in (True, False)]
    return [
        {"params": parameters, "weight_decay": by}
        for parameters, by in zip(parted, (decay, 0.0), strict=True)
        if parameters
    ]


def computed_in(settings: ProbeSettings, device: torch.device) -> str:
    """The torch name of the dtype that is computed in."""
    return settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")


def _computing(device: torch.device, dtype: str) -> Any:
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


def _held_out(
    model: Any, data: Data, size: int, device: torch.device, dtype: str
) -> list[float] | None:
    """The loss of every held-out window, in nats per token; None if one is not finite."""
    model.eval()
    losses: list[float] = []
    for windows in data.held_out.split(size):
        ids = windows.to(device)
        with torch.no_grad(), _computing(device, dtype):
            logits: Tensor = model(ids, use_cache=False).logits[:, :-1].float()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        losses += each.double().mean(1).tolist()
    return losses if all(map(_finite, losses)) else None


def _finite(value: float) -> bool:
    return abs(value) < float("inf")  # false for a NaN
