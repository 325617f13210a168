"""Matrices of many experts in one parameter, which stays where it is stored: one is cast at a time.

Experts may be most of a model, and of a layer. A class that multiplies with one expert after the
other asks its parameter for it by index; here it gets that one, and the others are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint.tensors import AT_ONCE, TensorInfo
from growkit.engine.in_blocks import Rows

OF_THE_SHAPE = frozenset({"shape", "dtype", "device", "ndim", "dim", "size", "numel"})
"""Attributes of a tensor that say nothing of its numbers."""


class Experts:
    """What takes the place of a parameter, [experts, …]: an index gives a single expert, cast.

    Whatever else is done with it is done with all of them, whole.

    Attributes:
        factor: what every expert is multiplied with.
    """

    def __init__(self, stored: Rows, parameter: nn.Parameter) -> None:
        self.factor = 1.0
        self._stored, self._parameter = stored, parameter
        self._together: Tensor | None = None
        self._gradient: Tensor | None = None

    def __len__(self) -> int:
        return len(self._parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int) or (isinstance(index, Tensor) and _is_a_number(index)):
            return self._one(range(len(self))[int(index)])
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter if name in OF_THE_SHAPE else self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        whole = [each.whole() if isinstance(each, cls) else each for each in args]
        named = {k: v.whole() if isinstance(v, cls) else v for k, v in (kwargs or {}).items()}
        return function(*whole, **named)

    def whole(self) -> Tensor:
        """All experts."""
        return torch.stack(list(self))

    def cast(self, index: int) -> Tensor:
        """An expert without a gradient."""
        one = self._stored(slice(index, index + 1))[0]
        one = one.to(self._parameter.device, self._parameter.dtype)
        return one if self.factor == 1 else one * self.factor

    def collect(self, index: int, gradient: Tensor) -> None:
        """Keep the gradient of an expert, until those of all are there."""
        if self._gradient is None:
            self._gradient = gradient.new_zeros(self._parameter.shape)
        self._gradient[index] += gradient

    def collected(self) -> Tensor | None:
        """The gradient of all experts; from now on others are kept."""
        found, self._gradient, self._together = self._gradient, None, None
        return found

    def _one(self, index: int) -> Tensor:
        if not torch.is_grad_enabled():
            return self.cast(index)
        if self._together is None:
            self._together = _Together.apply(self._parameter, self)  # type: ignore[no-untyped-call]
        one: Tensor = _One.apply(self._together, self, index)  # type: ignore[no-untyped-call]
        return one


def suits(info: TensorInfo) -> bool:
    """Whether a parameter that is stored as a tensor like this holds experts, and is large."""
    return len(info.shape) == 3 and info.elements > AT_ONCE


def lend(module: nn.Module, name: str, stored: Rows, like: Tensor) -> None:
    """Lend a module the matrices of experts.

    Args:
        module: has the parameter.
        name: of it, in the module.
        stored: the experts.
        like: of the shape and the dtype that are needed, where they are needed; it has no room.
    """
    parameter = nn.Parameter(like)
    module._parameters[name] = parameter
    vars(module)[name] = Experts(stored, parameter)


def take_back(module: nn.Module, name: str) -> None:
    """Let a module find its parameter again."""
    if isinstance(vars(module).get(name), Experts):
        del vars(module)[name]


def _is_a_number(index: Tensor) -> bool:
    return index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool


class _Together(torch.autograd.Function):
    """Goes backward when every expert that was used has: the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, experts: Experts) -> Tensor:
        ctx.experts = experts
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.experts.collected(), None


class _One(torch.autograd.Function):
    """A single expert."""

    @staticmethod
    def forward(ctx: Any, together: Tensor, experts: Experts, index: int) -> Tensor:
        ctx.experts, ctx.index = experts, index
        return experts.cast(index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.experts.collect(ctx.index, gradient)
        return gradient.new_zeros(()), None, None
