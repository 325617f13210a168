"""What a model is called with, and which calls run through its layers together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor

from growkit.base.errors import InputError, plain
from growkit.engine.passing import Arguments, Form

TOGETHER = 512
"""Tokens of prompts that run as one batch, at most: what a layer computes of them is in memory."""


@dataclass(frozen=True)
class Call:
    """One forward pass.

    Attributes:
        ids: token ids, [tokens].
        inputs: what else the class is called with, e.g. ``attention_mask``: tensors [1, ...].
        cached: whether keys and values are kept, as in generation.
        continues: index of the cached call that this one goes on from.
    """

    ids: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    cached: bool = False
    continues: int | None = None


@dataclass(frozen=True)
class RecordedCall:
    """What the layers are called with, in one call.

    Attributes:
        form: of the hidden states.
        arguments: of every layer, with stand-ins for what the one before hands on along.
        stand_ins: these.
    """

    form: Form
    arguments: list[Arguments]
    stand_ins: tuple[Any, ...]

    @property
    def uses_along(self) -> bool:
        """Whether layers are called with tensors that the one before hands on along."""
        tensors = [each for each in self.stand_ins if isinstance(each, Tensor)]
        return any(each.has(tensor) for each in self.arguments[1:] for tensor in tensors)


@dataclass(frozen=True)
class Batch:
    """Calls that run through layers as one: a processor multiplies large matrices faster.

    Attributes:
        count: number of calls.
        arguments: of every layer.
    """

    count: int
    arguments: list[Arguments]


class CallError(InputError):
    """A model cannot be called in this way.

    Attributes:
        call: index of the call.
        why: the reason alone, for whom other calls are enough.
    """

    def __init__(self, sentence: str, call: int, why: str) -> None:
        super().__init__(sentence)
        self.call, self.why = call, plain(why)


def alike(calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Calls that can be a batch, one after the other: the index of the first, and how many."""
    begin = 0
    for form, run in groupby(calls, _form):
        end = begin + len(list(run))
        most = TOGETHER // form[0] if form else 1
        while min(most, end - begin) > 1:
            count = min(most, end - begin)
            yield begin, count
            begin += count
        begin = end


def _form(call: Call) -> tuple[Any, ...] | None:
    """What calls of a batch have in common: the shapes of all that they are given."""
    if call.cached:
        return None
    return len(call.ids), *sorted((key, tuple(each.shape)) for key, each in call.inputs.items())
