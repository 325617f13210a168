"""The text of a probe: windows to train on, in an order for every seed, and windows held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.engine.oracle import longest_context
from growkit.engine.prompts import ids_of, load_tokenizer
from growkit.engine.texts import documents, read_text
from growkit.probing.settings import ProbeSettings

MOST_TEXT = 1 << 27
"""Bytes that are read of a text."""

MOST, FEW, FEWEST = 64, 16, 8
"""Windows that are held out, at most, of a short training, and at least."""

A_WORD = 100
"""Characters; a blank is not farther away where words are parted by blanks."""

SHARE = 16
"""Windows that a training takes for each that is held out: looking costs less than training."""


@dataclass(frozen=True)
class Data:
    """Windows of a text.

    Attributes:
        training: to train on, [windows, length]; they do not overlap.
        held_out: to measure the loss on, [windows, length], from the text's last tenth.
        sha256: of what was read of the text.
        cut: whether that is only its beginning.
    """

    training: Tensor
    held_out: Tensor
    sha256: str
    cut: bool

    def batch(self, seed: int, step: int, size: int) -> Tensor:
        """The windows of a step, [size, length], which follow from seed and step alone.

        Every window is taken once before any is taken twice.
        """
        count = len(self.training)
        numbers = range(step * size, (step + 1) * size)
        return torch.stack(
            [self.training[_order(seed, n // count, count)[n % count]] for n in numbers]
        )


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, count: int) -> Tensor:
    """In which order a seed takes all windows in one of its turns."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    return torch.randperm(count, generator=generator)


def make_data(text: str | Path, folder: Path, config: Any, settings: ProbeSettings) -> Data:
    """The windows of a text, by the tokenizer of a folder.

    Of a long text, documents are taken in a random order, and no more is tokenized than all seeds
    could take together.

    Args:
        text: a UTF-8 file.
        folder: where the tokenizer is.
        config: of the source, for its vocabulary and longest context.
        settings: how much is needed.

    Raises:
        InputError: the text cannot be read or is too short; there is no tokenizer, or it is that of
            another model.
    """
    longest = longest_context(config)
    length = min(settings.length, longest) if isinstance(longest, int) else settings.length
    content = read_text(str(text), MOST_TEXT)
    whole = content.decode("utf-8")
    cut = _last_tenth(whole)
    tokenizer = load_tokenizer(folder)
    taken = settings.steps * settings.batch
    windows = _windows(tokenizer, whole[:cut], length, taken * settings.seeds)
    held_out = _windows(
        tokenizer, whole[cut:], length, max(FEW, min(MOST, taken // SHARE)), spread=True
    )
    if len(held_out) >= FEWEST and len(windows) < settings.batch:
        raise InputError(
            f"text {text} has {len(windows)} windows of {length} tokens to train on, fewer than "
            f"the {settings.batch} of a step; give a longer text, a smaller --batch or --length"
        )
    if len(held_out) < FEWEST:
        raise InputError(
            f"text {text} has {len(windows)} windows of {length} tokens to train on and, in its "
            f"last tenth, {len(held_out)} to hold out; at least {settings.batch} and {FEWEST} are "
            "needed, give a longer text or a smaller --length"
        )
    largest = max(int(windows.max()), int(held_out.max()))
    if largest >= config["vocab_size"]:
        raise InputError(
            f"the tokenizer in {folder} makes token {largest} of {text}, but the model's "
            f"vocab_size is {config['vocab_size']}; they do not belong together"
        )
    cut_off = Path(text).stat().st_size > MOST_TEXT
    return Data(windows, held_out, hashlib.sha256(content).hexdigest(), cut_off)


def _last_tenth(text: str) -> int:
    """Where the last tenth begins: behind a blank, if one is near, as some languages have none."""
    whole = len(text) * 9 // 10
    return text.rfind(" ", max(whole - A_WORD, 0), whole) + 1 or whole


def _windows(tokenizer: Any, text: str, length: int, most: int, *, spread: bool = False) -> Tensor:
    """The windows of some documents in a row, [windows, length].

    Args:
        tokenizer: of the model.
        text: with the documents.
        length: tokens in a window.
        most: windows, at most.
        spread: whether as many documents as possible have a part in them.
    """
    parts = documents(text.encode())
    each = max(FEWEST, -(-most // max(len(parts), 1))) if spread else most
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    ids: list[int] = []
    for number in order.tolist():
        ids += ids_of(tokenizer, parts[number])[: each * length]
        if len(ids) >= most * length:
            break
    count = min(len(ids) // length, most)
    return torch.tensor(ids[: count * length], dtype=torch.long).view(count, length)
