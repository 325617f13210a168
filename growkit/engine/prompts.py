"""What the models are asked: windows of real text, or seeded random tokens."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.checkpoint.tensors import Config
from growkit.engine.oracle import longest_context
from growkit.engine.texts import documents, read_text
from growkit.engine.tokenizing import ids_of, load_tokenizer

T = TypeVar("T")

MOST_TOKENS = 1 << 22
"""Of all prompts together: thirty megabytes of ids, and far more of everything else."""

FEWEST = 8
"""Tokens of a text that must be predicted, at least: fewer show nothing."""


@dataclass(frozen=True)
class Prompts:
    """Token ids, one tensor [tokens] per prompt, and the hash of what was read of the text."""

    windows: tuple[Tensor, ...]
    text_sha256: str | None

    @property
    def tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(len(window) for window in self.windows)

    def cut(self, prompts: int, length: int) -> Prompts:
        """So many of them, from all over, and of each only the first tokens."""
        windows = _spread(self.windows, prompts)
        return replace(self, windows=tuple(window[:length] for window in windows))


def make_prompts(settings: Settings, folder: Path, config: Config) -> Prompts:
    """The prompts that the settings describe.

    Args:
        settings: text or random tokens, how many and how long.
        folder: where the tokenizer is.
        config: for the vocabulary and the longest context.

    Raises:
        InputError: the text cannot be read or is too short, there is no tokenizer for it, or the
            config has no usable context length.
    """
    prompts, wanted = settings.amount
    longest = longest_context(config) or wanted
    if not isinstance(longest, int) or longest < 2:
        raise InputError(
            f"max_position_embeddings is {longest!r} in {folder}; at least 2 was expected"
        )
    length = min(wanted, longest)
    if settings.text is None:
        if prompts * length > MOST_TOKENS:
            raise InputError(
                f"{prompts:,} prompts of {length:,} tokens are too many to compare; "
                f"give fewer or shorter ones, of at most {MOST_TOKENS:,} tokens in all"
            )
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (prompts, length)
        return Prompts(tuple(torch.randint(config["vocab_size"], shape, generator=generator)), None)
    file, raw = Path(settings.text), read_text(settings.text)
    ids = _tokenize(documents(raw), folder)
    counts = [len(tokens) // length + (len(tokens) % length > 1) for tokens in ids]
    if not any(counts):
        raise InputError(f"text {file} has fewer than 2 tokens in a row; give a longer one")
    predictions = sum(
        len(tokens) - count - (len(tokens) % length == 1)
        for tokens, count in zip(ids, counts, strict=True)
    )
    if predictions < FEWEST:
        raise InputError(
            f"text {file} has only {predictions} tokens to predict; at least {FEWEST} are needed, "
            "give a longer one"
        )
    largest = max(int(tokens.max()) for tokens in ids if len(tokens))
    if largest >= config["vocab_size"]:
        raise InputError(
            f"the tokenizer in {folder} makes token {largest} of {file}, but the model's "
            f"vocab_size is {config['vocab_size']}; they do not belong together"
        )
    windows = _windows(ids, counts, length, prompts)
    return Prompts(windows, hashlib.sha256(raw).hexdigest())


def _windows(
    ids: Sequence[Tensor], counts: Sequence[int], length: int, prompts: int
) -> tuple[Tensor, ...]:
    """Some windows of documents that have so many; the others never become tensors."""
    ends = list(accumulate(counts))
    windows = []
    for number in _spread(range(ends[-1]), prompts):
        document = bisect_right(ends, number)
        begin = length * (number - ends[document] + counts[document])
        windows.append(ids[document][begin : begin + length])
    return tuple(windows)


def _spread(windows: Sequence[T], count: int) -> tuple[T, ...]:
    """As many windows, from all over a text: its beginning may be like nothing else in it."""
    count = min(count, len(windows))
    return tuple(windows[(2 * i + 1) * len(windows) // (2 * count)] for i in range(count))


def _tokenize(parts: list[str], folder: Path) -> list[Tensor]:
    """Token ids of each document, by the folder's own tokenizer, special tokens included."""
    try:
        tokenizer = load_tokenizer(folder)
    except InputError as error:
        raise InputError(
            f"{error}, or leave out --text to compare on random tokens"
        ) from error.__cause__
    return [torch.tensor(ids_of(tokenizer, part), dtype=torch.long) for part in parts]
