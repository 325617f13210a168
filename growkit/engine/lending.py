"""Weights that a module has only while it computes; large ones stay in their files even then.

A layer of a large model in float64 is more than twice as large as its files. What a matrix is
multiplied with is small, so a part of the matrix is cast at a time, and of experts a single one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.tensors import AT_ONCE, TensorInfo, Weights, parts, total_bytes
from growkit.checkpoint.writing import give_back, keep_freed

LARGE = 1 << 30
"""Bytes of a checkpoint from which on memory is worth more than the time to get it again; of
smaller ones, as much is kept for the next layer."""

OF_THE_SHAPE = frozenset({"shape", "dtype", "device", "ndim", "dim", "size", "numel"})
"""Attributes of a tensor that do not depend on its numbers."""

Rows = Callable[[slice], Tensor]
"""Some rows of a tensor, as they are stored."""


class Lender:
    """Lends the weights of a checkpoint to the modules of a model.

    Args:
        weights: the checkpoint.
        stored: from the name of a parameter to that of the tensor it is stored as.
        dtype: what weights are cast to, but for those that the class keeps in another.
        device: where they are needed.

    Attributes:
        dtype: see above.
        steps: what is taken off some parameters, by their names in the model.
    """

    def __init__(
        self,
        weights: Weights,
        stored: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights, self._stored = weights, stored
        self.dtype, self._device = dtype, device
        tensors = weights.tensors
        experts = any(_is_large_stack(info) for info in tensors.values())
        self._large = experts or total_bytes(tensors) >= LARGE
        if not self._large:
            keep_freed(LARGE)
        self._fetched: dict[str, Tensor] = {}
        self.steps: Mapping[str, Tensor] = {}
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A parameter, or some rows of it, as it is stored."""
        # Files hold float32 as float32, even when all arithmetic is done in float64.
        with torch._C.DisableTorchFunction():
            found = self._weights.read(self._stored(name), rows)
            if name in self.steps:
                found = found.double() - self.steps[name][rows or slice(None)].to(found.device)
            return found

    def rows(self, name: str, used: Tensor) -> Tensor:
        """Some rows of a parameter, cast, [rows, columns]; ``used`` are their sorted numbers."""
        found = []
        for part in parts(self._weights, self._stored(name)):
            here = used[(used >= part.start) & (used < part.stop)] - part.start
            found.append(self.read(name, part)[here].to(self._device, self.dtype))
        return torch.cat(found)

    def whole(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """A parameter or buffer on the device, in this dtype; None for that in which it is stored.

        It is never whole in both.
        """
        info, places = self._info(name), parts(self._weights, self._stored(name))
        if len(places) == 1 or dtype in (None, info.torch_dtype):
            return self.read(name).to(self._device, dtype)
        with torch._C.DisableTorchFunction():
            whole = torch.empty(info.shape, dtype=dtype, device=self._device)
            for rows in places:
                whole[rows] = self.read(name, rows)
        return whole

    def fetch(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy what ``lent`` will need to the GPU while it computes; nothing without a GPU.

        A stream of its own keeps the copies from waiting for the computation. What was fetched
        before and has not been lent is forgotten.
        """
        self._fetched.clear()
        if self._copying:
            with torch.cuda.stream(self._copying):
                for key, name in names.items():
                    owner, last, empty = _owner(module, key)
                    stays = self._stays(owner, last, name)
                    self._fetched[name] = self.whole(name, None if stays else empty.dtype)

    @contextmanager
    def lent(
        self, module: nn.Module, names: Mapping[str, str], *, head: bool = False
    ) -> Iterator[None]:
        """Give a module some parameters, and take them back afterwards.

        Args:
            module: the module.
            names: from names of parameters in it to those in the model.
            head: whether it is the output head, which may be larger than any layer.
        """
        owners = [(name, *_owner(module, key)) for key, name in names.items()]
        buffer: Tensor | None = None
        try:
            for name, owner, last, empty in owners:
                if not self._stays(owner, last, name, head=head):
                    ready = self._ready(name, empty.dtype)
                    owner._parameters[last] = nn.Parameter(ready, ready.is_floating_point())
                    continue
                rows: Rows = partial(self.read, name)
                if self._device.type != "cpu" or not self._weights.cuts(self._stored(name)):
                    rows = self._ready(name, None).__getitem__
                if buffer is None:
                    buffer = torch.empty(AT_ONCE, dtype=self.dtype, device=self._device)
                lend(owner, last, rows, self._info(name).shape, buffer)
            yield
        finally:
            del buffer
            for _, owner, last, empty in owners:
                vars(owner).pop(last, None)
                owner._parameters[last] = empty
            if self._large:
                give_back()

    def _info(self, name: str) -> TensorInfo:
        return self._weights.tensors[self._stored(name)]

    def _stays(self, owner: nn.Module, last: str, name: str, *, head: bool = False) -> bool:
        """Whether a parameter is so large that it stays where it is stored."""
        info, parameter = self._info(name), owner._parameters[last]
        # Products of layers are taken as they will run, if nothing is cast.
        cast = info.torch_dtype != self.dtype
        if parameter is None or parameter.dtype != self.dtype or not (cast or head):
            return False
        return can_stay(owner, last, info) or (cast and _is_large_stack(info))

    def _ready(self, name: str, dtype: torch.dtype | None) -> Tensor:
        fetched = self._fetched.pop(name, None)
        if fetched is None:
            return self.whole(name, dtype)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copying)  # type: ignore[arg-type]
        fetched.record_stream(computing)  # else the memory may be reused while it is read
        return fetched


class Stored:
    """Takes the place of a large parameter in a module, and casts it in parts.

    A linear layer multiplies with some rows at a time; of [experts, …], an index makes a single
    expert. For any other operation the parameter is made whole.

    Attributes:
        factor: what the numbers are multiplied with.
        parameter: of the shape and dtype of the whole, for gradients; it takes no room.
    """

    def __init__(self, rows: Rows, parameter: nn.Parameter, buffer: Tensor) -> None:
        self.factor, self.parameter = 1.0, parameter
        self._rows, self._buffer = rows, buffer
        self._together: Tensor | None = None
        self._gradient: Tensor | None = None

    def __len__(self) -> int:
        return len(self.parameter)

    def __getitem__(self, index: Any) -> Tensor:
        number = isinstance(index, Tensor) and not (
            index.dim() or index.is_floating_point() or index.dtype == torch.bool
        )
        if not (number or isinstance(index, int)):
            return self.whole()[index]
        place = range(len(self))[int(index)]
        return self._part(slice(place, place + 1))[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter if name in OF_THE_SHAPE else self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function is functional.linear and len(args) > 1 and isinstance(args[1], cls):
            hidden, matrix, bias = (*args, named.get("bias"))[:3]
            if not isinstance(hidden, cls):
                product = _Product.apply(hidden, matrix.parameter, matrix)  # type: ignore[no-untyped-call]
                return product if bias is None else product + bias
        whole = [each.whole() if isinstance(each, cls) else each for each in args]
        named = {k: v.whole() if isinstance(v, cls) else v for k, v in named.items()}
        return function(*whole, **named)

    def whole(self) -> Tensor:
        """All of it."""
        return self._part(slice(0, len(self)))

    def _part(self, rows: slice) -> Tensor:
        """Some rows, with gradients."""
        if self._together is None and torch.is_grad_enabled():
            self._together = _Together.apply(self.parameter, self)  # type: ignore[no-untyped-call]
        part: Tensor = _Part.apply(self._together, self, rows)  # type: ignore[no-untyped-call]
        return part

    def cast(self, rows: slice, *, reuse: bool = False) -> Tensor:
        """Some rows, without gradients.

        Args:
            rows: which.
            reuse: put them into a buffer, which the next call with ``reuse`` overwrites.
        """
        part = self._rows(rows)
        reuse &= part.numel() <= len(self._buffer)
        if reuse and (part.dtype != self.dtype or self.factor != 1):
            part = self._buffer[: part.numel()].view(part.shape).copy_(part)
            return part if self.factor == 1 else part.mul_(self.factor)
        part = part.to(self.device, self.dtype)
        return part if self.factor == 1 else part * self.factor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Places of some rows, and these rows; each is overwritten by the next."""
        rows, *others = self.shape
        count = max(1, len(self._buffer) // prod(others))
        for begin in range(0, rows, count):
            places = slice(begin, min(begin + count, rows))
            yield places, self.cast(places, reuse=True)

    def collect(self, rows: slice, gradient: Tensor) -> None:
        """Keep the gradient of some rows, until those of all are there."""
        if self._gradient is None:
            self._gradient = gradient.new_zeros(self.shape)
        self._gradient[rows] += gradient

    def collected(self) -> Tensor | None:
        """The gradient of all rows; the next gradients begin anew."""
        found, self._gradient, self._together = self._gradient, None, None
        return found


def lend(
    module: nn.Module, name: str, rows: Rows, shape: tuple[int, ...], buffer: Tensor
) -> Stored:
    """Lend a module a parameter that stays where it is stored.

    Args:
        module: has the parameter.
        name: of it, in the module.
        rows: of the parameter.
        shape: of the parameter.
        buffer: room for some rows, of the dtype and on the device that are needed; parameters that
            are not used at the same time may share it.
    """
    parameter = nn.Parameter(buffer[:1].expand(shape))
    module._parameters[name] = parameter
    vars(module)[name] = stored = Stored(rows, parameter, buffer)
    return stored


def can_stay(module: nn.Module, name: str, info: TensorInfo) -> bool:
    """Whether a parameter is a large matrix of a linear layer.

    Two blocks would save little, and casting them anew for every product takes time.
    """
    return info.elements > 2 * AT_ONCE and name == "weight" and type(module) is nn.Linear


def _is_large_stack(info: TensorInfo) -> bool:
    """Whether a tensor holds the matrices of many experts."""
    return len(info.shape) == 3 and info.elements > AT_ONCE


@contextmanager
def scaled(layer: nn.Module, key: str, factor: float) -> Iterator[None]:
    """A layer with one of its parameters multiplied."""
    owner, last, parameter = _owner(layer, key)
    lent = vars(owner).get(last)
    if isinstance(lent, Stored):
        lent.factor = factor
        yield
        lent.factor = 1.0
    else:
        unscaled, parameter.data = parameter.data, parameter.data * factor
        yield
        parameter.data = unscaled


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str, nn.Parameter]:
    """The submodule that has a parameter, its name there, and the parameter."""
    path, _, last = key.rpartition(".")
    owner = module.get_submodule(path)
    parameter = owner._parameters[last]
    assert parameter is not None
    return owner, last, parameter


class _Product(torch.autograd.Function):
    """A product with a matrix, block by block."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parameter: Tensor, matrix: Stored) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.matrix = matrix
        product = hidden.new_empty(*hidden.shape[:-1], len(matrix))
        for rows, block in matrix.blocks():
            product[..., rows] = hidden @ block.T
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden)
        for rows, block in ctx.matrix.blocks():
            of_hidden += gradient[..., rows] @ block
        of_matrix = None
        if ctx.needs_input_grad[1]:
            of_matrix = gradient.flatten(0, -2).T @ hidden.flatten(0, -2)
        return of_hidden, of_matrix, None


class _Together(torch.autograd.Function):
    """Goes backward when every part that was used has: the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, stored: Stored) -> Tensor:
        ctx.stored = stored
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.stored.collected(), None


class _Part(torch.autograd.Function):
    """Some rows of a parameter: a single expert, or all."""

    @staticmethod
    def forward(ctx: Any, together: Tensor | None, stored: Stored, rows: slice) -> Tensor:
        ctx.stored, ctx.rows = stored, rows
        if rows.stop - rows.start == 1:
            return stored.cast(rows)
        return torch.cat([block.clone() for _, block in stored.blocks()])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.stored.collect(ctx.rows, gradient)
        return gradient.new_zeros(()), None, None
