"""Inference modes: the calls of a proof, with their lengths, positions, padding and caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.engine.calls import Call
from growkit.engine.device import RUNS
from growkit.engine.long_text_settings import lowered, reach
from growkit.engine.transformers_class import longest_context

SHORT = 16
"""Length of the prompt for all modes but the prefill."""

PADDING = 5
"""Number of padding tokens on the left."""

STEPS = (1, 2)
"""Numbers of tokens in the cached calls after the first."""

SHIFT = 7
"""First of the explicit positions."""

PREFILL = "prefill"
DECODING = "cached decoding"
EXPLICIT = "explicit positions"
LONGEST = "longest context"
LONG = "long texts"
RELOAD = "save and reload"
GENERATE = "generate"
LOSS = "loss"
ATTENTION = "attention: "

NO_NUMBERS = "the source computes NaN or infinite logits"


@dataclass(frozen=True)
class Mode:
    """One inference mode.

    Attributes:
        name: name for users.
        calls: the forward passes.
        padding: number of padding tokens at the beginning of each call.
        note: details of the mode; the reason why it is not tried, if there are no calls.
        failed: whether the source supports the mode, but the target does not.
    """

    name: str
    calls: tuple[Call, ...] = ()
    padding: int = 0
    note: str = ""
    failed: bool = False

    @property
    def strict(self) -> bool:
        """Whether it runs in strict float64 only: choices among tokens flip with rounding."""
        return any(call.settings for call in self.calls)

    @property
    def kernel(self) -> str:
        """The attention kernel whose calls these are; empty for a mode of every kernel."""
        return self.calls[0].kernel if self.calls else ""


def kernel_modes(ids: Tensor, kernels: Sequence[str]) -> list[Mode]:
    """Make a mode of every attention kernel: the same prompt, ``RUNS`` times."""
    return [Mode(f"{ATTENTION}{name}", (Call(ids, kernel=name),) * RUNS) for name in kernels]


def modes(windows: tuple[Tensor, ...], source: Config, target: Config) -> list[Mode]:
    """Make all inference modes; the prefill of every window is the first.

    Args:
        windows: token ids, each [tokens].
        source: config of the source, for the longest context.
        target: config of the target, for the longest context and the cache.
    """
    prompt = windows[0][:SHORT]
    count = len(prompt)
    all_modes = [Mode(PREFILL, tuple(Call(window) for window in windows))]
    if not target.get("use_cache", True):
        all_modes.append(Mode(DECODING, note="the config switches the cache off"))
    elif count <= sum(STEPS):
        all_modes.append(Mode(DECODING, note=f"the prompt has only {count} tokens"))
    else:
        all_modes.append(_decoding(prompt))
    mask = torch.tensor([[0] * PADDING + [1] * count])
    padded = torch.cat([prompt.new_zeros(PADDING), prompt])
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    note = f"{PADDING} tokens of padding before {count}"
    all_modes.append(Mode("left padding", (Call(padded, inputs),), PADDING, note))
    # As many tokens as with padding, so that all these calls form one batch.
    prompt = windows[0][: SHORT + PADDING]
    count = len(prompt)
    limits = [
        limit for config in (source, target) if isinstance(limit := longest_context(config), int)
    ]
    longest = max(limits, default=None)  # positions beyond the smaller limit must agree, too
    if longest is not None and longest > count:
        start = min(SHIFT, longest - count)
        shifted = torch.arange(start, start + count)[None]
        note = f"positions {start} to {start + count - 1}"
        all_modes.append(Mode(EXPLICIT, (_at(prompt, shifted),), note=note))
        spread = torch.linspace(0, longest - 1, count, dtype=torch.float64).long()[None]
        note = f"{count} tokens spread over positions 0 to {longest - 1:,}"
        all_modes.append(Mode(LONGEST, (_at(prompt, spread),), note=note))
    else:
        why = "the config has no max_position_embeddings"
        if longest is not None:
            why = f"the prompt is as long as the longest context, {longest} tokens"
        all_modes += [Mode(EXPLICIT, note=why), Mode(LONGEST, note=why)]
    settings, needed = lowered(source, target), min((reach(source, target), *limits))
    if settings or needed:
        tokens = torch.cat(windows)
        prompt = tokens.repeat(1 + needed // len(tokens))[: max(count, needed)]
        listed = ", ".join(f"{key} {value}" for key, value in settings.items())
        note = f"{len(prompt)} tokens" + (f", with {listed} in both models" if listed else "")
        all_modes.append(Mode(LONG, (Call(prompt, settings=settings),), note=note))
    return all_modes


class NotAskedError(InputError):
    """The source, or only the target, does not support a mode.

    Attributes:
        mode: name of the mode.
        by_target: whether only the target does not support it.
    """

    def __init__(self, sentence: str, mode: str, *, by_target: bool = False) -> None:
        super().__init__(sentence)
        self.mode = mode
        self.by_target = by_target

    def without(self, asked: Sequence[Mode]) -> list[Mode]:
        """Replace the mode by a note with the reason why it is not tried."""
        why = f"the source can, but {self}" if self.by_target else str(self)
        instead = Mode(self.mode, note=why, failed=self.by_target)
        return [instead if mode.name == self.mode else mode for mode in asked]


def _at(prompt: Tensor, positions: Tensor) -> Call:
    # Without a mask, transformers takes gaps between positions for the seams of packed documents.
    everything = torch.ones(1, len(prompt), dtype=torch.long)
    return Call(prompt, {"position_ids": positions, "attention_mask": everything})


def _decoding(prompt: Tensor) -> Mode:
    first, *others = prompt.split([len(prompt) - sum(STEPS), *STEPS])
    calls = [Call(first, cached=True)]
    for part in others:
        calls.append(Call(part, cached=True, continues=calls[-1]))
    note = f"{len(first)} tokens, then {' + '.join(map(str, STEPS))} from the cache"
    return Mode(DECODING, tuple(calls), note=note)
