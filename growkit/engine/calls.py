"""Calls of a model, and the values between its layers: hidden states, mostly [1, tokens, hidden].

A class may carry several states in one tensor. Its layers may return extras with the hidden states,
for example the choice of a router; placeholders take their place until the layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, plain

TOGETHER = 512
"""Limit for the tokens of a batch: memory holds everything that a layer computes for them."""

POSITIONS = "position_ids"
"""Keyword argument for positions."""

HIDDEN = "hidden_states"
"""Keyword argument for the hidden states, in classes that pass them to a layer by name."""


@dataclass(frozen=True)
class Call:
    """One forward pass.

    Attributes:
        ids: token ids, [tokens].
        inputs: other arguments of the class, e.g. ``attention_mask``: tensors [1, ...].
        cached: whether to keep keys and values, as in generation.
        continues: the cached call that this one continues, earlier in the same run.
        kernel: name of the attention kernel; such a call runs apart from others. Empty for the
            kernel that the class and torch choose.
        settings: other values of keys of the config; such a call runs apart from others, too.
    """

    ids: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    cached: bool = False
    continues: Call | None = None
    kernel: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class NoStackError(InputError):
    """The modules between embedding and head are not a stack of layers."""


class CallError(InputError):
    """The model class does not support this kind of call.

    Attributes:
        call: index of the call.
        why: the reason without its context, for a note if the other calls suffice.
    """

    def __init__(self, sentence: str, call: int, why: str) -> None:
        super().__init__(sentence)
        self.call, self.why = call, plain(why)


@dataclass(frozen=True)
class Form:
    """Layout of hidden states in a tensor.

    Attributes:
        shape: shape of the tensor.
        axis: dimension of the tokens.
    """

    shape: tuple[int, ...]
    axis: int

    @classmethod
    def of(cls, tensor: Tensor, tokens: int) -> Form:
        """Find the form of a tensor.

        Raises:
            NoStackError: the tensor does not hold hidden states of that many tokens.
        """
        shape = tuple(tensor.shape)
        for axis in (1, len(shape) - 2):
            if len(shape) > 2 and shape[axis] == tokens and 1 in shape[:axis]:
                return cls(shape, axis)
        raise NoStackError(f"layers pass on {list(shape)}")

    def flat(self, tensor: Tensor) -> Tensor:
        """Rearrange a tensor of this form to [tokens, hidden]."""
        return tensor.movedim(self.axis, 0).flatten(1)

    def formed(self, flat: Tensor) -> Tensor:
        """Rearrange [tokens, hidden] to this form, for any number of tokens."""
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        if all(size == 1 for size in before):
            # A view, since torch copies the matrix in a product with an operand of other strides.
            return flat.view(*before, -1, *after)
        return flat.view(-1, *before, *after).movedim(0, self.axis)


Extras = tuple[Any, ...]
"""Values that a layer returns in a tuple after its hidden states."""


def split_output(output: Any) -> tuple[Tensor, Extras | None]:
    """Split the output of a layer into hidden states and extras; None if it is not a tuple.

    Raises:
        NoStackError: the output has no hidden states.
    """
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0], tuple(output[1:])
    raise NoStackError(f"layers pass on a {type(output).__name__}")


def nan_like(value: Any) -> Any:
    """Make a placeholder for a tensor: NaN or extreme values, which show in every result."""
    if not isinstance(value, Tensor):
        return value
    nothing = torch.nan if value.is_floating_point() else torch.iinfo(torch.int32).min
    return torch.full_like(value, bool(nothing) if value.dtype == torch.bool else nothing)


@dataclass(frozen=True)
class Arguments:
    """Arguments of a layer after its hidden states.

    Attributes:
        positional: positional arguments.
        named: keyword arguments.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Arguments]:
        """Separate the hidden states from the other arguments.

        Raises:
            NoStackError: there are no hidden states.
        """
        named = dict(kwargs)
        state, *rest = args or (named.pop(HIDDEN, None),)
        if not isinstance(state, Tensor):
            raise NoStackError("layers are called without hidden states")
        return state, cls(tuple(rest), named)

    def changed(self, change: Callable[[Any], Any]) -> Arguments:
        """Copy with ``change`` applied to every value."""
        named = {key: change(value) for key, value in self.named.items()}
        return Arguments(tuple(map(change, self.positional)), named)

    def replaced(self, old: Sequence[Any], new: Sequence[Any]) -> Arguments:
        """Copy with some objects replaced, compared by identity."""
        by_id = {id(o): n for o, n in zip(old, new, strict=True) if o is not None}
        return self.changed(lambda value: by_id.get(id(value), value))

    def with_copied_containers(self) -> Arguments:
        """Copy with containers copied, so that a layer cannot change the originals."""
        containers = MutableMapping, list
        return self.changed(lambda value: copy(value) if isinstance(value, containers) else value)

    def call(self, layer: nn.Module, state: Tensor) -> tuple[Tensor, Extras | None]:
        """Run a layer; see ``split_output``."""
        return split_output(layer(state, *self.positional, **self.named))


class RecordedCall(NamedTuple):
    """Arguments of all layers in one call.

    Attributes:
        form: form of the hidden states.
        arguments: arguments of every layer, with placeholders for the previous layer's extras.
        placeholders: the placeholders themselves.
    """

    form: Form
    arguments: list[Arguments]
    placeholders: Extras


def batches(calls: Sequence[Call]) -> Iterator[tuple[int, Sequence[Call]]]:
    """Group consecutive calls whose inputs have the same shape, with the index of the first.

    The largest position of a batch decides on its rotary frequencies in some classes (LongRoPE), so
    the calls of a batch have the same.
    """

    def alike_in(call: Call) -> Any:
        inputs = sorted((key, tuple(tensor.shape)) for key, tensor in call.inputs.items())
        last = int(call.inputs[POSITIONS].max()) if POSITIONS in call.inputs else None
        return call.cached or call.kernel or bool(call.settings), len(call.ids), inputs, last

    first = 0
    for (separate, tokens, *_), run in groupby(calls, alike_in):
        alike = list(run)
        limit = 1 if separate else max(1, TOGETHER // tokens)
        for start in range(0, len(alike), limit):
            batch = alike[start : start + limit]
            if len(batch) > 1:
                yield first + start, batch
        first += len(alike)
