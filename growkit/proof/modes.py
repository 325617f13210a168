"""Inference modes: everything that breaks in practice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config
from growkit.engine.calls import Call
from growkit.engine.oracle import longest_context
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
        failed: whether it can be with the source, but not with the target.
    """

    name: str
    calls: tuple[Call, ...]
    padding: int = 0
    note: str = ""
    failed: bool = False


def modes(windows: tuple[Tensor, ...], source: Config, target: Config) -> list[Mode]:
    """All ways to ask, of which the prefill of every window is the first.

    Args:
        windows: token ids, each [tokens].
        source: config of the source, for the longest context.
        target: that of the target, for the longest context and the cache.
    """
    prompt = windows[0][:SHORT]
    count = len(prompt)
    found = [Mode(PREFILL, tuple(Call(window) for window in windows))]
    if not target.get("use_cache", True):
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
    limits = [limit for each in (source, target) if isinstance(limit := longest_context(each), int)]
    longest = max(limits, default=None)  # positions behind the smaller limit are to agree as well
    if longest is not None and longest > count:
        begin = min(SHIFT, longest - count)
        shifted = torch.arange(begin, begin + count)[None]
        note = f"positions {begin} to {begin + count - 1}"
        found.append(Mode(EXPLICIT, (_at(prompt, shifted),), note=note))
        spread = torch.linspace(0, longest - 1, count, dtype=torch.float64).long()[None]
        note = f"{count} tokens spread over positions 0 to {longest - 1:,}"
        found.append(Mode(LONGEST, (_at(prompt, spread),), note=note))
    else:
        why = "the config has no max_position_embeddings"
        if longest is not None:
            why = f"the prompt is as long as the longest context, {longest} tokens"
        found += [_not_tried(EXPLICIT, why), _not_tried(LONGEST, why)]
    return found


class NotAskedError(InputError):
    """The source, or the target alone, cannot be asked in one of the ways.

    Attributes:
        mode: name of that.
        by_target: whether it is the target alone.
    """

    def __init__(self, sentence: str, mode: str, *, by_target: bool = False) -> None:
        super().__init__(sentence)
        self.mode = mode
        self.by_target = by_target

    def without(self, asked: list[Mode]) -> list[Mode]:
        """The same ways, but for that one, which says why it is not tried."""
        instead = _not_tried(self.mode, str(self))
        if self.by_target:
            instead = Mode(self.mode, (), note=f"the source can, but {self}", failed=True)
        return [instead if mode.name == self.mode else mode for mode in asked]


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
    """How one inference mode went; what is left out was not tried, or is not promised."""
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
