"""Needles in a haystack, small: keys and values in a text, and a question for one of them.

A needle is a line ``KEY = VALUE`` and a question ``KEY =`` at the end; keys and values are two
tokens each, drawn at random, so that nothing but the context tells the answer. The haystack is the
held-out text. As in the papers on DINT (arXiv 2501.17486) and Shared DIFF, the needle that is asked
for lies at five depths, among other needles.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COUNTS = (1, 2, 4, 6)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES = 20
"""Windows of each number of needles at each depth."""

WIDTH = 2
"""Tokens of a key, and of a value."""

NEEDLE, QUESTION = 2 * WIDTH + 2, 2 * WIDTH + 1
SHARE = 4
"""One of so many windows holds needles while a model trains."""

FIRST = 257
"""Tokens below are the end of a text and single bytes."""


@dataclass(frozen=True)
class Asked:
    """Windows whose last tokens are a question and its answer.

    Attributes:
        windows: [windows, context].
        answer: where the value lies in the context, the first of its tokens; [windows].
    """

    windows: Tensor
    answer: Tensor


@cache
def signs(folder: Path) -> tuple[int, int]:
    """The tokens of ``=`` and of a new line."""
    known = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return known["="], known["Ċ"]


def counts_in(context: int) -> list[int]:
    """Numbers of needles that leave half of the context to the text, and at least one."""
    return [n for n in COUNTS if n == 1 or n * NEEDLE + QUESTION <= context // 2]


def with_needles(
    hay: Tensor, needles: int, depth: float, generator: torch.Generator, text: Any
) -> tuple[Tensor, int]:
    """A window with needles, and where its answer lies.

    Args:
        hay: tokens of a text, [context].
        needles: how many.
        depth: of the needle that is asked for, 0 for the beginning; the others lie anywhere.
        generator: draws keys, values and places.
        text: whose tokenizer it is.
    """
    equal, line = signs(text.folder)
    vocabulary = int(text.about["vocabulary"])
    room = len(hay) - needles * NEEDLE - QUESTION
    drawn = torch.randint(FIRST, vocabulary, (needles, 2 * WIDTH), generator=generator).tolist()
    lines = [[*each[:WIDTH], equal, *each[WIDTH:], line] for each in drawn]
    anywhere = torch.randint(0, room + 1, (needles - 1,), generator=generator).tolist()
    places = sorted([(round(depth * room), 0), *((at, n) for n, at in enumerate(anywhere, 1))])
    tokens: list[int] = []
    answer = last = 0
    for at, number in places:
        tokens += hay[last:at].tolist()
        if number == 0:
            answer = len(tokens) + WIDTH + 1
        tokens += lines[number]
        last = at
    tokens += [*hay[last:room].tolist(), *lines[0][:-1]]
    return torch.tensor(tokens), answer


def asked(text: Any, context: int, needles: int, depth: float, samples: int = SAMPLES) -> Asked:
    """Windows of the test files, the same for every model."""
    generator = torch.Generator().manual_seed(1000 * needles + round(100 * depth))
    hay = text.held_out("test", samples, context)
    made = [with_needles(each, needles, depth, generator, text) for each in hay]
    windows, answers = zip(*made, strict=True)
    return Asked(torch.stack(windows), torch.tensor(answers))


def mixed(batch: Tensor, text: Any, seed: int, first: int) -> Tensor:
    """A batch of which a share holds needles, with a question at the end.

    Args:
        batch: windows of the text, [windows, context].
        text: whose tokenizer it is.
        seed: of the training.
        first: number of the first window, from which all that is drawn follows.
    """
    counts = counts_in(batch.shape[1])
    made = list(batch)
    for number in range(len(batch)):
        if (first + number) % SHARE:
            continue
        generator = torch.Generator().manual_seed(7_000_003 * seed + first + number)
        which = int(torch.randint(len(counts), (1,), generator=generator))
        depth = float(torch.rand(1, generator=generator))
        made[number] = with_needles(batch[number], counts[which], depth, generator, text)[0]
    return torch.stack(made)


@torch.no_grad()
def retrieved(model: Any, text: Any, context: int, device: str) -> dict[str, float]:
    """The share of questions that are answered, all tokens of the value, by number of needles."""
    found = {}
    for needles in counts_in(context):
        right = [
            _answered(model, asked(text, context, needles, depth).windows.to(device))
            for depth in DEPTHS
        ]
        found[f"retrieved of {needles}"] = float(torch.cat(right).float().mean())
    return found


def _answered(model: Any, windows: Tensor) -> Tensor:
    said = model(input_ids=windows).logits[:, -WIDTH - 1 : -1].argmax(-1)
    return (said == windows[:, -WIDTH:]).all(-1)
