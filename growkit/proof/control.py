"""Controls of a comparison: a deliberate fault in the target, and rounding in the source."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from growkit.base.limits import Limit, strict_limit, within
from growkit.engine.calls import Call, CallError
from growkit.engine.layerwise import Stage
from growkit.engine.lending import altered
from growkit.engine.metrics import Distance, Head, distance_of, error_of

MAX_TOKENS = 128
"""Limit for the tokens of the prompt with a fault, which the backward pass uses, too."""

FAULT = 1e-3
"""Relative size of the fault that the negative control must notice."""

VISIBLE = 1e-6
"""Share of a fault that must reach the output, or another is tried: less may drown in rounding."""


@dataclass
class Controls:
    """Additional runs: a deliberate fault in the target, and the source disturbed by rounding.

    Attributes:
        call: the beginning of the first prompt, at most ``MAX_TOKENS`` tokens, for the fault.
        noise: relative size of one rounded sum, added to the source's states after every layer on
            the whole first prompt.
        against_itself: whether the target with the fault is compared with the target itself, not
            with the source.
        only: part of the names of the parameters that may be changed.
        fault: the changed parameter; empty until a layer is found in which a fault has an effect.
        control: distance between the logits with and without the fault.
        rounding: distance between the logits with and without the noise.
    """

    call: Call
    noise: float
    against_itself: bool
    only: str = ""
    fault: str = ""
    control: Distance = field(default_factory=Distance)
    rounding: Distance = field(default_factory=Distance)
    _faulty_state: Tensor | None = None
    _noisy_state: Tensor | None = None

    @property
    def limit(self) -> Limit:
        """Limit for an exact promise."""
        return strict_limit(self.rounding.relative, self.noise)

    def add_rounding_noise(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Run the first prompt through the source with noise."""
        for stage in stages:
            noisy = self._noisy_state
            state = stage.after[0] if noisy is None else stage.again(0, noisy)
            generator = torch.Generator().manual_seed(len(stage.name))
            noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
            # Equal states are rounded alike, so that noise breaks no tie between equal tokens.
            noise = noise[state.cpu().unique(dim=0, return_inverse=True)[1]]
            # Zeros have no rounding, and a norm would enlarge any noise in them to their size.
            noise = noise.to(state) * state.any(-1, keepdim=True)
            self._noisy_state = state + self.noise * state.square().mean().sqrt() * noise
            yield stage

    def inject_fault(self, stages: Iterator[Stage], first: int, call: int) -> Iterator[Stage]:
        """Insert the fault into the largest matrix of the first layer where it has an effect.

        Args:
            stages: stages of the target.
            first: index of the first layer to try.
            call: index of ``self.call`` among the calls.
        """
        before: Tensor | None = None
        for stage in stages:
            if self._faulty_state is not None:
                self._faulty_state = stage.again(call, self._faulty_state)
            elif before is not None and stage.layer is not None and stage.layer >= first:
                self._inject(stage, call, before)
            before = stage.after[call]
            yield stage

    def _inject(self, stage: Stage, call: int, before: Tensor) -> None:
        matrices = {key: p for key, p in stage.module.named_parameters() if p.dim() > 1}
        elements = {key: p.numel() for key, p in matrices.items() if self.only in key}
        clean, largest = stage.after[call], 0.0
        for key in sorted(elements, key=lambda name: -elements[name]):
            with altered(stage.module, [key], 1 + FAULT):
                faulty = stage.again(call, before)
            # For example, an identity block multiplies the fault by zero.
            if (error := error_of(faulty, clean)) > largest:
                largest, self._faulty_state = error, faulty
                self.fault = f"{stage.name}.{key} × {1 + FAULT}"
            if not within(largest, FAULT * VISIBLE):
                return

    def measure(
        self, heads: tuple[Head, Head], ends: tuple[Tensor, Tensor], first: tuple[Call, Tensor]
    ) -> None:
        """Compare the logits; if no fault in a layer reaches them, use a fault in the head.

        Args:
            heads: heads of source and target.
            ends: output of the last layer of source and target for ``self.call``.
            first: the first prompt, and the output of the source's last layer for it.
        """
        assert self._noisy_state is not None
        clean = heads[0], [first[1]]
        self.rounding = distance_of(clean, (heads[0], [self._noisy_state]), [first[0].ids])
        side, head, ids = 1 if self.against_itself else 0, heads[1], [self.call.ids]
        clean = heads[side], [ends[side]]
        if self._faulty_state is not None:
            self.control = distance_of(clean, (head, [self._faulty_state]), ids)
            if not within(self.control.relative, FAULT * VISIBLE):
                return
        self.fault = f"output head × {1 + FAULT}"
        faulty = (lambda hidden: head(hidden) * (1 + FAULT)), [ends[1]]
        self.control = distance_of(clean, faulty, ids)


TRIES = 3
"""Number of layers in which a kind of tensor is disturbed before it counts as without effect."""


@dataclass
class Coverage:
    """Kinds of tensors in the target's layers; each is disturbed, which must change an output.

    Tensors are of one kind if they have the same name, but for numbers, and the same shape, in
    modules of the same class.

    Attributes:
        tries: by kind, the name of the first tensor, and the number of layers in which it had no
            effect; None if it had one.
    """

    tries: dict[object, tuple[str, int | None]] = field(default_factory=dict)

    @property
    def without_effect(self) -> list[str]:
        """The first tensor of every kind that no output depends on."""
        return [name for name, count in self.tries.values() if count is not None]

    def disturb(
        self, stages: Iterator[Stage], call: int, layers: Sequence[int | None] | None
    ) -> Iterator[Stage]:
        """Disturb the tensors of layers while they are loaded.

        Args:
            stages: stages of the target.
            call: index of a call without cache, which runs on its own.
            layers: the source's layer of every layer; None for one that returns its input.
        """
        before: Tensor | None = None
        for stage in stages:
            number = stage.layer
            idle = number is None or (layers is not None and layers[number] is None)
            if before is not None and not idle:
                self._disturb(stage, call, before)
            before = stage.after[call]
            yield stage

    def _disturb(self, stage: Stage, call: int, before: Tensor) -> None:
        kinds: dict[object, list[str]] = {}
        for key, tensor in stage.module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and tensor.numel():
                owner = type(stage.module.get_submodule(key.rpartition(".")[0]))
                kind = re.sub(r"\b\d+\b", "0", key), tuple(tensor.shape), owner
                kinds.setdefault(kind, []).append(key)
        for of_kind, keys in kinds.items():
            name, count = self.tries.get(of_kind, (f"{stage.name}.{keys[0]}", 0))
            if count is None or count == TRIES:
                continue
            error = math.inf  # a layer that no longer runs shows it, too
            with altered(stage.module, keys), suppress(CallError):
                error = error_of(stage.again(call, before), stage.after[call])
            self.tries[of_kind] = name, count + 1 if within(error, FAULT * VISIBLE) else None
