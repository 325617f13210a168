"""What layers pass on: hidden states, mostly [1, tokens, hidden], and what goes along.

A class may carry several states side by side in one tensor, and its layers may hand on more than
hidden states: what a router or an indexer found, say. Until layers run, stand-ins take its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN = "hidden_states"
"""What classes call the hidden states that they give a layer by name."""


class NoStackError(Exception):
    """Something else than a stack of layers stands between embedding and head."""


@dataclass(frozen=True)
class Form:
    """How hidden states of some tokens lie in a tensor.

    Attributes:
        shape: of the tensor.
        axis: along which the tokens are.
    """

    shape: tuple[int, ...]
    axis: int

    @classmethod
    def of(cls, tensor: Tensor, tokens: int) -> Form:
        """The form of a tensor.

        Raises:
            NoStackError: it is none of hidden states of that many tokens.
        """
        shape = tuple(tensor.shape)
        for axis in (1, len(shape) - 2):
            if len(shape) > 2 and shape[axis] == tokens and 1 in shape[:axis]:
                return cls(shape, axis)
        raise NoStackError(f"layers hand on {list(shape)}")

    def flat(self, tensor: Tensor) -> Tensor:
        """As [tokens, hidden]."""
        return tensor.movedim(self.axis, 0).flatten(1)

    def formed(self, flat: Tensor) -> Tensor:
        """From [tokens, hidden], of any number of tokens."""
        before, behind = self.shape[: self.axis], self.shape[self.axis + 1 :]
        if all(size == 1 for size in before):
            # Not moved: torch copies a matrix to multiply it with what has other strides than this.
            return flat.view(*before, -1, *behind)
        return flat.view(-1, *before, *behind).movedim(0, self.axis)


@dataclass(frozen=True)
class Handed:
    """What a layer hands on.

    Attributes:
        alone: whether it is a tensor, else it is a tuple or a list that begins with it.
        along: what else is in the tuple.
    """

    alone: bool = True
    along: tuple[Any, ...] = ()

    @classmethod
    def of(cls, output: Any) -> tuple[Tensor, Handed]:
        """Hidden states as they are, and what they come with.

        Raises:
            NoStackError: it is nothing like that.
        """
        if isinstance(output, Tensor):
            return output, cls()
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            return output[0], cls(alone=False, along=tuple(output[1:]))
        raise NoStackError(f"layers hand on a {type(output).__name__}")

    def with_state(self, state: Tensor) -> Any:
        """Hidden states in such an output."""
        return state if self.alone else (state, *self.along)

    def unknown(self) -> Handed:
        """The same with stand-ins along, which nobody can compute with unnoticed."""
        return Handed(self.alone, tuple(map(_unknown, self.along)))


def _unknown(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    nothing = torch.nan if value.is_floating_point() else torch.iinfo(torch.int32).min
    return torch.full_like(value, bool(nothing) if value.dtype == torch.bool else nothing)


@dataclass
class Arguments:
    """What a layer is called with beside hidden states.

    Attributes:
        positional: the first is the hidden states, if they are not given by name.
        named: by name.
        by_name: whether hidden states are given by name.
    """

    positional: tuple[Any, ...]
    named: dict[str, Any]
    by_name: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Arguments]:
        """Hidden states, and the others.

        Raises:
            NoStackError: there are none.
        """
        named = dict(kwargs)
        by_name = not args and HIDDEN in named
        state = named.pop(HIDDEN) if by_name else args[0] if args else None
        if not isinstance(state, Tensor):
            raise NoStackError("layers are called without hidden states")
        return state, cls(args[1:], named, by_name)

    def replaced(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> Arguments:
        """The same, but for some objects that others take the place of."""

        def of(value: Any) -> Any:
            places = zip(old, new, strict=True)
            return value if value is None else next((n for o, n in places if o is value), value)

        pairs = self.named.items()
        return Arguments(
            tuple(map(of, self.positional)), {key: of(v) for key, v in pairs}, self.by_name
        )

    def has(self, value: Any) -> bool:
        """Whether this very object is among them."""
        return any(each is value for each in (*self.positional, *self.named.values()))

    def apart(self) -> Arguments:
        """The same, but for containers: what a layer puts into these is not seen by others."""
        pairs = self.named.items()
        return Arguments(
            tuple(map(_apart, self.positional)), {k: _apart(v) for k, v in pairs}, self.by_name
        )

    def call(self, state: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All positional and named arguments."""
        if self.by_name:
            return self.positional, {HIDDEN: state, **self.named}
        return (state, *self.positional), self.named


def _apart(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def untouched(state: Tensor, handed: Tensor, version: int) -> bool:
    """Whether a layer is given what the one before handed on, not what was made of it since."""
    same = state is handed or (
        state.shape == handed.shape
        and state.stride() == handed.stride()
        and state.data_ptr() == handed.data_ptr()
    )
    return same and handed._version == version
