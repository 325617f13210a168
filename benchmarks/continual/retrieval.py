"""Needles in a haystack, small: keys and values in a text, a question, and attention to the answer.

A needle is a line ``KEY = VALUE`` and a question ``KEY =`` at the end; keys and values are two
tokens each, drawn at random, so that only the context has the answer. The haystack is the held-out
text. As in the papers on DINT (arXiv 2501.17486) and Shared DIFF, the needle that is asked for is
at five depths, among other needles.
"""

from __future__ import annotations

import json
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


def asked(text: Any, context: int, needles: int, depth: float) -> tuple[Tensor, Tensor]:
    """Windows of the test files, the same for every model, which end in a question and its answer.

    Returns:
        The windows, [windows, context], and the place of the answer in the text, [windows].
    """
    generator = torch.Generator().manual_seed(1000 * needles + round(100 * depth))
    hay = text.held_out("test", SAMPLES, context)
    made = [with_needles(each, needles, depth, generator, text) for each in hay]
    windows, answers = zip(*made, strict=True)
    return torch.stack(windows), torch.tensor(answers)


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


def retrieved(model: Any, text: Any, context: int) -> dict[str, float]:
    """The share of questions that are answered, all tokens of the value, by number of needles."""
    found = {}
    for needles in counts_in(context):
        right = []
        for depth in DEPTHS:
            windows = asked(text, context, needles, depth)[0].to(model.device)
            answers = model(input_ids=windows).logits[:, -WIDTH - 1 : -1].argmax(-1)
            right.append((answers == windows[:, -WIDTH:]).all(-1))
        found[f"retrieved of {needles}"] = float(torch.cat(right).float().mean())
    return found


def attention(model: Any, text: Any, context: int) -> dict[str, float]:
    """The share of attention on the answer, and on what has nothing to do with it.

    Of the token before the answer, the sizes of its row in a map, which add up to one; over all
    layers, heads and depths. The question itself is neither.
    """
    needles, usual = counts_in(context)[-1], model.config._attn_implementation
    model.set_attn_implementation("eager")  # others of transformers hold no maps
    answers, noise = [], []
    for depth in DEPTHS:
        windows, at = (each.to(model.device) for each in asked(text, context, needles, depth))
        found = model(input_ids=windows, output_attentions=True, use_cache=False).attentions
        of_answer = torch.zeros(windows.shape, device=model.device)
        for number in range(WIDTH):
            of_answer.scatter_(1, (at + number)[:, None], 1.0)
        of_noise = 1 - of_answer
        of_noise[:, -QUESTION:] = 0
        for each in found:
            row = each[:, :, -WIDTH - 1].abs()  # [batch, heads, tokens]
            row = row / row.sum(-1, keepdim=True)
            answers.append((row * of_answer[:, None]).sum(-1).mean())
            noise.append((row * of_noise[:, None]).sum(-1).mean())
    model.set_attn_implementation(usual)
    return {
        "attention to the answer": float(torch.stack(answers).mean()),
        "attention to noise": float(torch.stack(noise).mean()),
    }


def needles(model: Any, text: Any, context: int) -> dict[str, float]:
    """Retrieval and attention."""
    return retrieved(model, text, context) | attention(model, text, context)


MEASURES = {"needles": needles}
"""What can be measured next to the loss where a rate has decayed, without gradients."""
