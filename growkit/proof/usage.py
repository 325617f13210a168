"""What people do with a model folder as a whole: load it, save it, load it again, generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint import total_parameters
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import temporary
from growkit.proof import ModeResult
from growkit.proof.modes import SHORT, result
from growkit.proof.oracle import load, quiet
from growkit.proof.strict import strict_float64

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
    sizes = [8 * total_parameters(each.tensors) for each in (before, after)]
    ways: tuple[tuple[str, Callable[[], ModeResult]], ...] = (
        ("save and reload", lambda: _reloaded(after, prompt[:SHORT], device)),
        ("generate", lambda: _generated(before, after, prompt[:SHORT], device, exact)),
    )
    for name, run in ways:
        if sum(sizes) > MOST_BYTES:
            note = f"not tried: whole models of more than {MOST_BYTES >> 20} MiB in float64"
            yield result(name, note)
            continue
        with strict_float64(), quiet():
            yield run()


def _reloaded(after: Checkpoint, prompt: Tensor, device: torch.device) -> ModeResult:
    model = load(after.folder, torch.float64, device, "eager")
    expected = _logits(model, prompt)
    with temporary("reload") as scratch:
        model.save_pretrained(scratch)  # type: ignore[operator]
        again = load(scratch, torch.float64, device, "eager")
    # torch compares bits; the weights' addresses may change the order of sums.
    read, written = again.state_dict(), model.state_dict()
    same = read.keys() == written.keys() and all(read[name].equal(written[name]) for name in read)
    scale = expected.square().mean().sqrt()
    error = float((_logits(again, prompt) - expected).abs().max() / scale)
    note = "every weight comes back" if same else "weights change when transformers saves them"
    return result("save and reload", note, relative=error, kept=same)


def _generated(
    before: Checkpoint, after: Checkpoint, prompt: Tensor, device: torch.device, exact: bool
) -> ModeResult:
    texts = []
    for each in (before, after):
        model: Any = load(each.folder, torch.float64, device, "eager")
        answer = model.generate(
            prompt[None].to(device), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        texts.append(answer[0, len(prompt) :].tolist())
    one, other = texts
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if same is None and len(one) == len(other):
        note, kept = f"the same {len(one)} tokens, greedily", True
    else:
        count = min(len(one), len(other)) if same is None else same
        note, kept = f"the first {count} of {NEW_TOKENS} tokens are the same, greedily", False
    return result("generate", note, kept=kept if exact else None)


@torch.no_grad()
def _logits(model: nn.Module, prompt: Tensor) -> Tensor:
    ids = prompt[None].to(next(model.parameters()).device)
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits
