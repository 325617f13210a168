"""The ways in which a model is asked: everything that breaks in practice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.checkpoint.tensors import Config
from growkit.engine.calls import Call
from growkit.engine.oracle import longest_context
from growkit.errors import InputError
from growkit.results.proof import ModeResult
from growkit.results.sentences import NOT_TRIED

SHORT = 16
"""Tokens of the prompt that all but the prefill are tried on."""

PADDING = 5
"""Tokens of padding on the left."""

STEPS = (1, 2)
"""Tokens that are decoded at a time, after the rest of the prompt."""

SHIFT = 7
"""Position of the first token where positions are given."""

PREFILL = "prefill"
DECODING = "cached decoding"
EXPLICIT = "explicit positions"
LONGEST = "longest context"


@dataclass(frozen=True)
class Mode:
    """One way to ask.

    Attributes:
        name: for people.
        calls: the forward passes; those that continue others count from the first of the mode.
        padding: tokens at the beginning of each call whose logits mean nothing.
        note: what exactly is tried; or why it cannot be, if there are no calls.
    """

    name: str
    calls: tuple[Call, ...]
    padding: int = 0
    note: str = ""


def modes(windows: tuple[Tensor, ...], config: Config) -> list[Mode]:
    """All ways to ask, of which the prefill of every window is the first.

    Args:
        windows: token ids, each [tokens].
        config: for the cache and the longest context.
    """
    prompt = windows[0][:SHORT]
    count = len(prompt)
    found = [Mode(PREFILL, tuple(Call(window) for window in windows))]
    if not config.get("use_cache", True):
        found.append(_not_tried(DECODING, "the config switches the cache off"))
    elif count <= sum(STEPS):
        found.append(_not_tried(DECODING, f"the prompt has only {count} tokens"))
    else:
        found.append(_decoding(prompt))
    mask = torch.tensor([[0] * PADDING + [1] * count])
    positions = torch.tensor([[0] * PADDING + list(range(count))])
    padded = torch.cat([prompt.new_zeros(PADDING), prompt])
    inputs = {"attention_mask": mask, "position_ids": positions}
    note = f"{PADDING} tokens of padding before {count}"
    found.append(Mode("left padding", (Call(padded, inputs),), PADDING, note))
    # As many tokens as that, so that all of these calls are one batch.
    prompt = windows[0][: SHORT + PADDING]
    count = len(prompt)
    longest = longest_context(config)
    if isinstance(longest, int) and longest > count:
        begin = min(SHIFT, longest - count)
        shifted = torch.arange(begin, begin + count)[None]
        note = f"positions {begin} to {begin + count - 1}"
        found.append(Mode(EXPLICIT, (_at(prompt, shifted),), note=note))
        spread = torch.linspace(0, longest - 1, count, dtype=torch.float64).long()[None]
        note = f"{count} tokens spread over positions 0 to {longest - 1:,}"
        found.append(Mode(LONGEST, (_at(prompt, spread),), note=note))
    else:
        why = "the config has no max_position_embeddings"
        if isinstance(longest, int):
            why = f"the prompt is as long as the longest context, {longest} tokens"
        found += [_not_tried(EXPLICIT, why), _not_tried(LONGEST, why)]
    return found


class NotAskedError(InputError):
    """The source cannot be asked in one of the ways.

    Attributes:
        mode: name of that.
    """

    def __init__(self, sentence: str, mode: str) -> None:
        super().__init__(sentence)
        self.mode = mode

    def without(self, asked: list[Mode]) -> list[Mode]:
        """The same ways, but for that one, which says why it is not tried."""
        return [_not_tried(m.name, str(self)) if m.name == self.mode else m for m in asked]


def _not_tried(name: str, why: str) -> Mode:
    return Mode(name, (), note=NOT_TRIED + why)


def result(
    name: str,
    note: str,
    *,
    relative: float | None = None,
    tolerance: float | None = None,
    native: float | None = None,
    native_tolerance: float | None = None,
    kept: bool | None = None,
) -> ModeResult:
    """How one way of asking went; what is left out was not tried, or is not promised."""
    return ModeResult(
        name=name,
        relative=relative,
        tolerance=tolerance,
        native=native,
        native_tolerance=native_tolerance,
        kept=kept,
        note=note,
    )


def _at(prompt: Tensor, positions: Tensor) -> Call:
    # Without a mask, transformers takes gaps between positions for the seams of packed documents.
    everything = torch.ones(1, len(prompt), dtype=torch.long)
    return Call(prompt, {"position_ids": positions, "attention_mask": everything})


def _decoding(prompt: Tensor) -> Mode:
    first, *others = prompt.split([len(prompt) - sum(STEPS), *STEPS])
    calls = [Call(first, cached=True)]
    calls += [Call(part, cached=True, continues=i) for i, part in enumerate(others)]
    note = f"{len(first)} tokens, then {' + '.join(map(str, STEPS))} from the cache"
    return Mode(DECODING, tuple(calls), note=note)
