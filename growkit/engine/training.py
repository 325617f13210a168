"""Training in true float64: a whole model of transformers, and AdamW with a law of updates.

It needs room for a model's weights, gradients and two moments, 32 bytes for each parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from growkit.engine.strict import strict_float64
from growkit.planning.updates import Update

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW."""

RATE, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
"""Of AdamW. Everything decays, so that every factor has something to do."""

EPS = 1e-6
"""Large enough that gradients which are nothing but rounding move nothing."""

BYTES = 32
"""Of memory for each parameter: weight, gradient and two moments."""


@dataclass(frozen=True)
class Beginning:
    """What a training begins with.

    Attributes:
        moments: of every parameter.
        steps: that each has taken.
        options: of AdamW for each, where they are not as usual.
    """

    moments: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class StrictTraining:
    """A model that AdamW trains.

    Adam does not depend on the scale of gradients but for its eps. Where the law multiplies eps by
    a factor that differs within a parameter, gradients are divided by it instead.

    Args:
        model: in float64.
        updates: factors of the settings of each parameter, by its name; new parameters do not
            train. None for the settings as they are.
        beginning: the moments of earlier steps; None to begin without.
    """

    def __init__(
        self,
        model: Any,
        updates: Mapping[str, Update] | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        self._model = model
        self._trained: dict[str, tuple[nn.Parameter, Tensor]] = {}
        groups = []
        for name, parameter in model.named_parameters():
            update = Update() if updates is None else updates[name]
            if not parameter.is_floating_point() or update.new:
                continue
            self._trained[name] = parameter, torch.from_numpy(update.gradient).to(parameter.device)
            groups.append(
                {
                    "params": [parameter],
                    "lr": RATE * update.rate,
                    "weight_decay": DECAY * update.decay,
                    "eps": EPS,
                    **(beginning.options.get(name, {}) if beginning else {}),
                }
            )
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS)
        if beginning is None:
            return
        for name, (parameter, factor) in self._trained.items():
            state = self._optimizer.state[parameter]
            state["step"] = torch.tensor(float(beginning.steps[name]), dtype=torch.float32)
            for key, found in beginning.moments[name].items():
                scale = factor if key == "exp_avg" else factor.square()
                state[key] = found.to(parameter) / scale

    def step(self, windows: Sequence[Tensor]) -> float:
        """Take a step on some windows of tokens, each [tokens]; their mean loss before it."""
        total = 0.0
        with strict_float64():
            for loss in self._losses(windows):
                loss.backward()
                total += float(loss.detach())
        for parameter, factor in self._trained.values():
            if parameter.grad is not None:
                parameter.grad /= factor
        self._optimizer.step()
        self._model.zero_grad()
        return total

    def gather(self, windows: Sequence[Tensor]) -> dict[str, dict[str, Tensor]]:
        """Take the first step, without a law of updates; the moments that it leaves."""
        self.step(windows)
        return {
            name: {key: self._optimizer.state[parameter][key].clone() for key in MOMENTS}
            for name, (parameter, _) in self._trained.items()
        }

    def loss(self, windows: Sequence[Tensor]) -> float:
        """Of some windows, without a step."""
        with strict_float64(), torch.no_grad():
            return sum(map(float, self._losses(windows)))

    def _losses(self, windows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Of each window its part of the mean loss of all predictions, in nats."""
        predictions = sum(len(ids) - 1 for ids in windows)
        for ids in windows:
            logits = self._logits(ids)
            labels = ids[1:].to(logits.device)
            sums = nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
            yield sums / predictions

    def logits(self, ids: Tensor) -> Tensor:
        """Of a window, [tokens, vocabulary]."""
        with strict_float64(), torch.no_grad():
            return self._logits(ids)

    def _logits(self, ids: Tensor) -> Tensor:
        device = next(self._model.parameters()).device
        found: Tensor = self._model(ids[None].to(device), use_cache=False).logits[0]
        return found

    def disturb(self, amount: float, seed: int) -> None:
        """Change every weight by up to so much of it, at random."""
        generator = torch.Generator().manual_seed(seed)
        for parameter, _ in self._trained.values():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.mul_(1 + amount * (2 * noise - 1).to(parameter.device))
