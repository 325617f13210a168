"""Inference modes: everything that breaks in practice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign
from growkit.base.tensors import Config, total_parameters
from growkit.base.units import size
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import temporary
from growkit.engine.calls import Call
from growkit.engine.metrics import error_of, finite
from growkit.engine.oracle import load_model, longest_context, quiet
from growkit.engine.strict import strict_float64
from growkit.results.proof import ModeResult

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
        name: shown to users.
        calls: the forward passes; a call that continues another refers to it by its index here.
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
    """All inference modes; the prefill of every window is the first.

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
        """The same modes, with the reason why this one is not tried."""
        instead = _not_tried(self.mode, str(self))
        if self.by_target:
            instead = Mode(self.mode, (), note=f"the source can, but {self}", failed=True)
        return [instead if mode.name == self.mode else mode for mode in asked]


def _not_tried(name: str, why: str) -> Mode:
    return Mode(name, (), note=why)


def result(
    name: str,
    note: str,
    *,
    relative: float | None = None,
    tolerance: float | None = None,
    native: float | None = None,
    native_tolerance: float | None = None,
    kept: bool | None = None,
    tried: bool = True,
) -> ModeResult:
    """How one inference mode went; values that were not measured are left out."""
    return ModeResult(
        name=name,
        relative=relative,
        tolerance=tolerance,
        native=native,
        native_tolerance=native_tolerance,
        kept=kept,
        tried=tried,
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


MOST_BYTES = 1 << 29
"""Memory that whole models may take here: all else that is proved needs no more than a layer."""

NEW_TOKENS = 16
"""Tokens that are generated."""


def used(
    before: Checkpoint, after: Checkpoint, prompt: Tensor, device: torch.device, exact: bool
) -> Iterator[ModeResult]:
    """Save the target and load it again; let both models generate. All in strict float64.

    Args:
        before: the source.
        after: the target.
        prompt: token ids, [tokens].
        device: where to run.
        exact: whether both must generate the same.

    Yields:
        What was tried, and how it went.
    """
    tokens = before.config["vocab_size"]
    sizes = [8 * total_parameters(each.tensors) for each in (before, after)]
    prompt = prompt[:SHORT]
    ways: tuple[tuple[str, Callable[[Checkpoint], Any], Callable[..., ModeResult]], ...] = (
        ("save and reload", partial(_reloaded, prompt=prompt, device=device), _same_weights),
        ("generate", partial(_generated, prompt, device, tokens), _same_text),
    )
    for name, run, judge in ways:
        if sum(sizes) > MOST_BYTES:
            why = f"whole models of more than {size(MOST_BYTES)} in float64"
            yield result(name, why, tried=False)
            continue
        with strict_float64(), quiet():
            try:
                found = run(after)
            except ModeError as error:
                try:
                    run(before)
                except ModeError:  # so it is no fault of the target
                    yield result(name, str(error), tried=False)
                else:
                    yield result(name, str(error), kept=False if exact else None)
                continue
            yield judge(found, partial(run, before), exact=exact)


class ModeError(InputError):
    """transformers cannot do this with a model that it loads and runs."""


def _reloaded(model: Checkpoint, prompt: Tensor, device: torch.device) -> tuple[bool, float]:
    """Whether weights are the same once saved and loaded, and how far logits are then apart."""
    loaded: Any = load_model(model, torch.float64, device, "eager")
    with temporary("reload") as scratch, _using(model, "save and reload"):
        expected = _logits(loaded, prompt)
        loaded.save_pretrained(scratch)
        again = load_model(scratch, torch.float64, device, "eager")
        found = _logits(again, prompt)
    # torch compares bits; the weights' addresses may change the order of sums.
    read, written = again.state_dict(), loaded.state_dict()
    same = read.keys() == written.keys() and all(read[name].equal(written[name]) for name in read)
    return same, error_of(found, expected)


def _same_weights(found: tuple[bool, float], *_: Any, exact: bool) -> ModeResult:
    same, error = found
    note = "every weight comes back" if same else "weights change when transformers saves them"
    return result("save and reload", note, relative=finite(error), kept=same)


def _generated(prompt: Tensor, device: torch.device, tokens: int, model: Checkpoint) -> list[int]:
    """Greedy continuation; settings of generation in the folder are ignored.

    Args:
        prompt: token ids, [tokens].
        device: where to run.
        tokens: number of tokens, the first of the vocabulary, that it may choose among.
        model: the checkpoint.
    """
    from transformers import GenerationConfig

    loaded: Any = load_model(model, torch.float64, device, "eager")
    longest = longest_context(model.config)
    if isinstance(longest, int):  # what comes behind it may have no embedding
        prompt = prompt[: max(1, longest - NEW_TOKENS)]
        count = max(1, min(NEW_TOKENS, longest - len(prompt)))
    else:
        count = NEW_TOKENS
    others = list(range(tokens, model.config["vocab_size"])) or None
    greedily = GenerationConfig(
        max_new_tokens=count, do_sample=False, pad_token_id=0, suppress_tokens=others
    )
    with _using(model, "generate"):
        ids = prompt[None].to(device)
        everything = torch.ones_like(ids)
        answer = loaded.generate(ids, attention_mask=everything, generation_config=greedily)
        text: list[int] = answer[0, len(prompt) :].tolist()
        return text


def _same_text(one: list[int], source: Callable[[], list[int]], *, exact: bool) -> ModeResult:
    other = source()
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if same is None and len(one) == len(other):
        note, kept = f"the same {len(one)} tokens, greedily", True
    else:
        count = min(len(one), len(other)) if same is None else same
        first = f"the first {count}" if count else "none"
        note, kept = f"{first} of {len(other)} tokens are the same, greedily", False
    return result("generate", note, kept=kept if exact else None)


@contextmanager
def _using(model: Checkpoint, what: str) -> Iterator[None]:
    try:
        with foreign(f"transformers cannot {what}", f"that is the class of {model.folder}"):
            yield
    except InputError as error:
        raise ModeError(str(error)) from error


@torch.no_grad()
def _logits(model: nn.Module, prompt: Tensor) -> Tensor:
    ids = prompt[None].to(next(model.parameters()).device)
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits
