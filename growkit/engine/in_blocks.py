"""Linear layers whose matrix stays where it is stored, and is cast some rows at a time.

A layer of a large model in float64 is twice as large as its files say, and more than twice if they
hold bfloat16. What a matrix is multiplied with is small, so a part of it is enough at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint.tensors import AT_ONCE, TensorInfo

Rows = Callable[[slice], Tensor]
"""Some rows of a matrix, as they are stored."""


class InBlocks(nn.Linear):
    """What a linear layer is while it is lent a large matrix; see ``lend`` and ``take_back``.

    Its parameter has the shape and the dtype of the matrix, but no room of its own. It is there for
    gradients.
    """

    stored: Rows
    buffer: Tensor
    factor: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The matrix, whole: for classes that do something else with it than to multiply."""
        whole: Tensor = _Whole.apply(self._parameters["weight"], self)  # type: ignore[no-untyped-call]
        return whole

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Places of rows, and these rows; each is overwritten by the next."""
        count = max(1, len(self.buffer) // self.in_features)
        for begin in range(0, self.out_features, count):
            places = slice(begin, min(begin + count, self.out_features))
            part = self.stored(places)
            if part.dtype != self.buffer.dtype or self.factor != 1:
                part = self.buffer[: part.numel()].view(part.shape).copy_(part)
            yield places, part if self.factor == 1 else part.mul_(self.factor)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        product: Tensor = _Product.apply(hidden, self._parameters["weight"], self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def suits(module: nn.Module, name: str, info: TensorInfo) -> bool:
    """Whether a parameter, stored as a tensor like this, can be lent in blocks, and is large.

    Two blocks would save little, and casting them anew for every product takes time.
    """
    return info.elements > 2 * AT_ONCE and name == "weight" and type(module) is nn.Linear


def lend(module: nn.Module, stored: Rows, shape: tuple[int, ...], buffer: Tensor) -> None:
    """Lend a linear layer a matrix.

    Args:
        module: one that ``suits``.
        stored: the matrix.
        shape: of the matrix, [out, in].
        buffer: room for a block, of the dtype that is needed, where it is needed; others that are
            not used at the same time may have it too.
    """
    module.__class__ = InBlocks
    vars(module).update(stored=stored, factor=1.0, buffer=buffer)
    module._parameters["weight"] = nn.Parameter(buffer[:1].expand(shape))


def take_back(module: nn.Module) -> None:
    """Make a linear layer what it was, but for its parameter."""
    if isinstance(module, InBlocks):
        del module.stored, module.factor, module.buffer
        module.__class__ = nn.Linear  # type: ignore[assignment]


class _Product(torch.autograd.Function):
    """A product with a matrix in blocks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parameter: Tensor, module: InBlocks) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.module = module
        product = hidden.new_empty(*hidden.shape[:-1], module.out_features)
        for rows, block in module.blocks():
            product[..., rows] = hidden @ block.T
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden)
        for rows, block in ctx.module.blocks():
            of_hidden += gradient[..., rows] @ block
        of_matrix = None
        if ctx.needs_input_grad[1]:
            of_matrix = gradient.flatten(0, -2).T @ hidden.flatten(0, -2)
        return of_hidden, of_matrix, None


class _Whole(torch.autograd.Function):
    """All blocks of a matrix."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, module: InBlocks) -> Tensor:
        return torch.cat([block.clone() for _, block in module.blocks()])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
