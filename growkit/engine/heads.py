"""Logits of two models side by side, from what their last layers hand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from growkit.engine.metrics import Distance

Head = Callable[[Tensor], Tensor]
"""From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""

TOKENS_FIRST = 64
"""Tokens whose logits come first, before the size of the vocabulary is known."""

LOGITS_AT_ONCE = 1 << 24
"""Logits of one model that are compared at a time; for each, the head is read once."""


def distance_of(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Distance:
    """How far the logits of two models are apart; see ``logits_in_pieces``."""
    distance = Distance()
    for _, logits, others, following, position in logits_in_pieces(source, target, ids):
        distance.add(logits, others, following, position)
    return distance


def logits_in_pieces(
    source: tuple[Head, Sequence[Tensor]],
    target: tuple[Head, Sequence[Tensor]],
    ids: Sequence[Tensor],
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, int]]:
    """Logits of two models, of as many tokens at a time as there is room for, over all prompts.

    Args:
        source: its head, and what its last layer hands on of every prompt, each [tokens, hidden].
        target: likewise.
        ids: the tokens of every prompt, each [tokens].

    Yields:
        The index of a prompt, and what ``Distance.add`` takes of some of its tokens.
    """
    following = [torch.cat([each[1:], each.new_full((1,), -1)]) for each in ids]
    at_once, index, position = TOKENS_FIRST, 0, 0
    while index < len(ids):
        taken: list[tuple[int, slice]] = []
        room = at_once
        while room and index < len(ids):
            rows = slice(position, min(position + room, len(ids[index])))
            taken.append((index, rows))
            room -= rows.stop - position
            position = rows.stop
            if position == len(ids[index]):
                index, position = index + 1, 0
        sizes = [rows.stop - rows.start for _, rows in taken]
        logits, others = (
            head(torch.cat([states[of][rows] for of, rows in taken])).split(sizes)
            for head, states in (source, target)
        )
        for (of, rows), one, other in zip(taken, logits, others, strict=True):
            yield of, one, other, following[of][rows], rows.start
        at_once = max(1, LOGITS_AT_ONCE // logits[0].shape[-1])
