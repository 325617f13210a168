"""Training in true float64: a whole model of transformers, and AdamW with a law of updates.

It needs room for a model's weights, gradients and two moments, 32 bytes for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from growkit.engine.strict import strict_float64
from growkit.planning.updates import Update

MOMENTS = ("exp_avg", "exp_avg_sq")

RATE, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
"""Of AdamW. Everything decays, so that every factor has something to do."""

EPS = 1e-6
"""Large enough that gradients which are nothing but rounding move nothing."""

BYTES = 32
"""Of memory for each parameter: weight, gradient and two moments."""

PLAIN = Update()


@dataclass(frozen=True)
class Custom:
    """How an optimizer treats a parameter, beside what the law of updates says.

    Attributes:
        betas: of the moments.
        amsgrad: whether the largest second moment counts.
        lr: by what its learning rate is off.
        weight_decay: by what its weight decay is off.
        eps: by what its eps is off.
    """

    betas: tuple[float, float] = BETAS
    amsgrad: bool = False
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


USUAL = Custom()


@dataclass(frozen=True)
class Beginning:
    """What a training begins with.

    Attributes:
        moments: of every parameter.
        steps: that each has taken.
        customs: how each is treated, where that is not as usual.
    """

    moments: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, float]
    customs: Mapping[str, Custom] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """Elements of a parameter that have one eps.

    Attributes:
        name: of the parameter.
        parameter: of the model.
        where: which of its elements, [as the parameter]; None for all.
        leaf: what the optimizer sees.
    """

    name: str
    parameter: nn.Parameter
    where: Tensor | None
    leaf: Tensor

    def give(self) -> None:
        """Hand the gradient over."""
        gradient = self.parameter.grad
        if self.where is not None and gradient is not None:
            self.leaf.grad = gradient[self.where]

    def take(self) -> None:
        """Take what was stepped."""
        if self.where is not None:
            self.parameter.data[self.where] = self.leaf.data


class Training:
    """A model that AdamW trains.

    Args:
        model: in float64.
        updates: what the settings of each parameter are multiplied with, by its name; new ones
            stay as they are. None for the settings as they are.
        customs: how an optimizer treats parameters, by their names.
    """

    def __init__(
        self,
        model: Any,
        updates: Mapping[str, Update] | None = None,
        customs: Mapping[str, Custom] | None = None,
    ) -> None:
        self._model = model
        self._parts: list[_Part] = []
        groups = []
        for name, parameter in model.named_parameters():
            update = PLAIN if updates is None else updates[name]
            if not parameter.is_floating_point() or update.new:
                continue
            of = (customs or {}).get(name, USUAL)
            for where, eps in _by_eps(update, parameter):
                leaf = parameter if where is None else parameter.data[where].requires_grad_()
                self._parts.append(_Part(name, parameter, where, leaf))
                group = {"params": [leaf], "betas": of.betas, "amsgrad": of.amsgrad}
                group["lr"] = RATE * update.rate * of.lr
                group["weight_decay"] = DECAY * update.decay * of.weight_decay
                groups.append({**group, "eps": EPS * eps * of.eps})
        self._optimizer = torch.optim.AdamW(groups)

    def step(self, windows: Sequence[Tensor]) -> float:
        """Take a step on some windows of tokens, each [tokens]; their mean loss before it."""
        total = 0.0
        with strict_float64():
            for loss in self._losses(windows):
                loss.backward()
                total += float(loss.detach())
        for part in self._parts:
            part.give()
        self._optimizer.step()
        for part in self._parts:
            part.take()
        for parameter in self._model.parameters():
            parameter.grad = None
        return total

    def gather(self, windows: Sequence[Tensor]) -> dict[str, dict[str, Tensor]]:
        """The moments after a step of no length."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self.step(windows)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return self.state()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The moments of every parameter that is trained with one eps."""
        return {
            part.name: {key: self._optimizer.state[part.leaf][key].clone() for key in MOMENTS}
            for part in self._parts
            if part.where is None
        }

    def begin(self, beginning: Beginning) -> None:
        """Begin with the moments of steps that were taken before."""
        for part in self._parts:
            of = self._optimizer.state[part.leaf]
            of["step"] = torch.tensor(float(beginning.steps[part.name]), dtype=torch.float32)
            for key, found in beginning.moments[part.name].items():
                moment = found.to(part.leaf)
                of[key] = (moment if part.where is None else moment[part.where]).clone()

    def loss(self, windows: Sequence[Tensor]) -> float:
        """Of some windows, without a step."""
        with strict_float64(), torch.no_grad():
            return sum(map(float, self._losses(windows)))

    def _losses(self, windows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Of each window its part of the mean loss of all predictions."""
        predictions = sum(len(ids) - 1 for ids in windows)
        return (_loss(self._model, ids) / predictions for ids in windows)

    def logits(self, ids: Tensor) -> Tensor:
        """Of a window, [tokens, vocabulary]."""
        with strict_float64(), torch.no_grad():
            return _logits(self._model, ids)

    def disturb(self, amount: float, seed: int) -> None:
        """Change every weight by up to so much of it, at random."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for part in self._parts:
                noise = torch.rand(part.leaf.shape, generator=generator, dtype=torch.float64)
                part.leaf.mul_(1 + amount * (2 * noise - 1).to(part.leaf.device))
                part.take()


def _by_eps(update: Update, parameter: Tensor) -> Iterator[tuple[Tensor | None, float]]:
    """Elements of a parameter with the factor of their eps."""
    factors = torch.from_numpy(update.gradient)
    values = factors.unique().tolist()
    for value in values:
        here = (factors == value).to(parameter.device)
        yield here.expand(parameter.shape) if len(values) > 1 else None, value


def _logits(model: Any, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    found: Tensor = model(ids[None].to(device), use_cache=False).logits[0]
    return found


def _loss(model: Any, ids: Tensor) -> Tensor:
    """The sum of all predictions' losses, in nats."""
    logits = _logits(model, ids)
    labels = ids[1:].to(logits.device)
    return nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
