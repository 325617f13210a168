"""Weights that a module has only while it computes; large ones stay in their files even then.

A layer of a large model in float64 is more than twice as large as its files. The activations that a
matrix multiplies are small, so the matrix is cast in parts, and experts one at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.tensors import AT_ONCE, TensorInfo, Weights, parts, total_bytes
from growkit.base.torch_internals import buffers_of, parameters_of, stored_dtypes
from growkit.model.checkpoint.writing import give_back, keep_freed

LARGE = 1 << 30
"""Bytes from which a checkpoint is large: freed memory is returned to the system. Smaller models
keep up to as much for the next layer."""

IN_ORDER = frozenset({"cpu", "mps"})
"""Devices that copy and compute in one order, without streams."""

SHAPE_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "dim", "size", "numel"})
"""Attributes of a tensor that do not depend on its values."""

Rows = Callable[[slice], Tensor]
"""Reads some rows of a tensor, in their stored dtype."""


HEADROOM = 2
"""A device keeps checkpoints if this many times their size is free."""

Copies = dict[str, Tensor]
"""Stored tensors of a checkpoint that a device keeps, by name."""


def copies_on(device: torch.device, checkpoints: Sequence[Weights]) -> list[Copies | None]:
    """Where a device keeps the tensors of checkpoints, so that each crosses to it once.

    Args:
        device: the device.
        checkpoints: the checkpoints.

    Returns:
        An empty dictionary for each, which lenders fill; None for each if they have no room, or for
        a device whose memory is the CPU's or is not known.
    """
    free = 0
    if device.type not in IN_ORDER:
        with suppress(AttributeError, RuntimeError):  # an older torch, or a backend without it
            free = torch.accelerator.get_memory_info(device)[0]
    stored = sum(total_bytes(checkpoint.tensors) for checkpoint in checkpoints)
    return [{} if HEADROOM * stored <= free else None for _ in checkpoints]


class Lender:
    """Lends the weights of a checkpoint to the modules of a model.

    Args:
        weights: the checkpoint.
        stored: maps the name of a parameter to the name of its stored tensor.
        dtype: dtype of the weights after casting, except those that the class keeps in another.
        device: device of the model.
        copies: stored tensors that the device keeps; see ``copies_on``.

    Attributes:
        dtype: see above.
        stays: whether large matrices may stay in their files while they are lent.
    """

    def __init__(
        self,
        weights: Weights,
        stored: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        self._weights, self._stored = weights, stored
        self._copies = copies
        self.dtype, self._device = dtype, device
        tensors = weights.tensors
        experts = any(_is_large_stack(info) for info in tensors.values())
        self._large = experts or total_bytes(tensors) >= LARGE
        if not self._large:
            keep_freed(LARGE)
        self._fetched: dict[str, Tensor] = {}
        self.stays = True
        self._copying = torch.Stream(device) if device.type not in IN_ORDER else None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a parameter, or some rows of it, in its stored dtype."""
        # Files hold float32 as float32, even when all arithmetic is done in float64.
        with stored_dtypes():
            return self._weights.read(self._stored(name), rows)

    def rows(self, name: str, used: Tensor) -> Tensor:
        """Read and cast some rows of a parameter, [rows, columns]; ``used``: sorted indices."""
        blocks = []
        for part in parts(self._weights, self._stored(name)):
            here = used[(used >= part.start) & (used < part.stop)] - part.start
            blocks.append(self.read(name, part)[here].to(self._device, self.dtype))
        return torch.cat(blocks)

    def whole(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Load a parameter or buffer to the device in this dtype; None for the stored dtype.

        Memory never holds it whole in both dtypes.
        """
        info, places = self._info(name), parts(self._weights, self._stored(name))
        if self._device.type != "cpu":
            return self._on_device(name, places).to(dtype)
        if len(places) == 1 or dtype in (None, info.torch_dtype):
            return self.read(name).to(self._device, dtype)
        with stored_dtypes():
            loaded = torch.empty(info.shape, dtype=dtype, device=self._device)
            for rows in places:
                loaded[rows] = self.read(name, rows)
        return loaded

    def _on_device(self, name: str, places: Sequence[slice]) -> Tensor:
        """Copy a parameter to the device as it is stored, since a CPU would convert it first."""
        stored = self._stored(name)
        if self._copies and stored in self._copies:
            if self._copying:  # whose stream may have made the copy
                torch.accelerator.current_stream(self._device).wait_stream(self._copying)
            return self._copies[stored]
        with stored_dtypes():
            pieces = [self.read(name, rows).to(self._device) for rows in places]
            copy = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if self._copies is not None:
            self._copies[stored] = copy
        return copy

    def fetch(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Prefetch the parameters for ``lent`` to the device while it computes, if the device can.

        The copies have a stream of their own, so that they do not wait for the computation.
        Parameters that were fetched earlier and not lent are dropped.
        """
        self._fetched.clear()
        if self._copying:
            with self._copying:
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
            names: maps parameter names in the module to names in the model.
            head: whether the module is the output head, which may be larger than any layer.
        """
        owners = [(name, *_owner(module, key)) for key, name in names.items()]
        buffer: Tensor | None = None
        try:
            for name, owner, last, empty in owners:
                if not self._stays(owner, last, name, head=head):
                    ready = self._ready(name, empty.dtype)
                    parameters_of(owner)[last] = nn.Parameter(ready, ready.is_floating_point())
                    continue
                rows: Rows = partial(self.read, name)
                if self._device.type != "cpu" or not self._weights.cuts(self._stored(name)):
                    rows = self._ready(name, None).__getitem__
                if buffer is None:
                    buffer = torch.empty(AT_ONCE, dtype=self.dtype, device=self._device)
                stand_in = nn.Parameter(buffer[:1].expand(self._info(name).shape))
                parameters_of(owner)[last] = stand_in
                vars(owner)[last] = Stored(rows, stand_in, buffer)
            yield
        finally:
            del buffer
            for _, owner, last, empty in owners:
                vars(owner).pop(last, None)
                parameters_of(owner)[last] = empty
            if self._large:
                give_back()

    def _info(self, name: str) -> TensorInfo:
        return self._weights.tensors[self._stored(name)]

    def _stays(self, owner: nn.Module, last: str, name: str, *, head: bool = False) -> bool:
        """Whether a parameter is so large that it stays in its file."""
        info, parameter = self._info(name), parameters_of(owner)[last]
        # Without a cast, layers multiply with whole matrices, as they do in use.
        cast = info.torch_dtype != self.dtype
        if parameter is None or parameter.dtype != self.dtype or not (cast or head):
            return False
        if not self.stays:
            return False
        # With two blocks or fewer, little memory is saved for the time of a cast in every product.
        large = info.elements > 2 * AT_ONCE and last == "weight" and type(owner) is nn.Linear
        return large or (cast and _is_large_stack(info))

    def _ready(self, name: str, dtype: torch.dtype | None) -> Tensor:
        fetched = self._fetched.pop(name, None)
        if fetched is None:
            return self.whole(name, dtype)
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_stream(self._copying)  # type: ignore[arg-type]
        fetched.record_stream(computing)  # else the memory may be reused while it is read
        return fetched


class Stored:
    """Takes the place of a large parameter in a module, and casts it in parts.

    A linear layer multiplies with some rows at a time, and indexing [experts, …] casts a single
    expert. Any other operation casts the whole parameter.

    Args:
        rows: reads rows of the parameter.
        parameter: see below.
        buffer: flat buffer for some rows, in the dtype and on the device of the computation;
            parameters that are not used at the same time may share it.

    Attributes:
        factor: multiplier of the values.
        parameter: a stand-in of the full shape and dtype, for gradients; it takes no memory.
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
        return getattr(self.parameter if name in SHAPE_ATTRIBUTES else self.whole(), name)

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
        loaded = [argument.whole() if isinstance(argument, cls) else argument for argument in args]
        named = {k: v.whole() if isinstance(v, cls) else v for k, v in named.items()}
        return function(*loaded, **named)

    def whole(self) -> Tensor:
        """Cast the whole parameter, with gradients."""
        return self._part(slice(0, len(self)))

    def _part(self, rows: slice) -> Tensor:
        """Cast some rows, with gradients."""
        if self._together is None and torch.is_grad_enabled():
            self._together = _Together.apply(self.parameter, self)  # type: ignore[no-untyped-call]
        part: Tensor = _Part.apply(self._together, self, rows)  # type: ignore[no-untyped-call]
        return part

    def cast(self, rows: slice, *, reuse: bool = False) -> Tensor:
        """Cast some rows, without gradients.

        Args:
            rows: range of the rows.
            reuse: write them into a buffer that the next call with ``reuse`` overwrites.
        """
        part = self._rows(rows)
        reuse &= part.numel() <= len(self._buffer)
        if reuse and (part.dtype != self.dtype or self.factor != 1):
            part = self._buffer[: part.numel()].view(part.shape).copy_(part)
            return part if self.factor == 1 else part.mul_(self.factor)
        part = part.to(self.device, self.dtype)
        return part if self.factor == 1 else part * self.factor

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over ranges of rows and the cast rows; each block overwrites the last."""
        rows, *others = self.shape
        count = max(1, len(self._buffer) // prod(others))
        for start in range(0, rows, count):
            places = slice(start, min(start + count, rows))
            yield places, self.cast(places, reuse=True)

    def collect(self, rows: slice, gradient: Tensor) -> None:
        """Accumulate the gradient of some rows."""
        if self._gradient is None:
            self._gradient = gradient.new_zeros(self.shape)
        self._gradient[rows] += gradient

    def collected(self) -> Tensor | None:
        """Return the accumulated gradient of all rows, and reset it."""
        gradient, self._gradient, self._together = self._gradient, None, None
        return gradient


def _is_large_stack(info: TensorInfo) -> bool:
    """Whether a tensor holds the matrices of many experts."""
    return len(info.shape) == 3 and info.elements > AT_ONCE


@contextmanager
def altered(layer: nn.Module, keys: Iterable[str], factor: float | None = None) -> Iterator[None]:
    """Multiply parameters and buffers of a layer, inside this context.

    Args:
        layer: the layer.
        keys: their names in the layer.
        factor: the factor; None to multiply columns by 0.5 to 1.5, as norms undo a common factor.
            Zeros then become these factors.
    """
    with ExitStack() as restored:
        for key in keys:
            path, _, last = key.rpartition(".")
            owner = layer.get_submodule(path)
            tensor = {**parameters_of(owner), **buffers_of(owner)}[last]
            assert tensor is not None
            if isinstance(lent := vars(owner).get(last), Stored):
                restored.enter_context(patch.object(lent, "factor", factor or -0.5))
                continue
            restored.callback(setattr, tensor, "data", tensor.data)
            if factor is not None:
                tensor.data = tensor.data * factor
                continue
            ramp = torch.linspace(0.5, 1.5, tensor.shape[-1] if tensor.dim() else 1).to(tensor)
            values = tensor.data if tensor.any() else torch.ones_like(tensor)
            tensor.data = values * ramp.view(tensor.shape[-1:])
        yield


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str, nn.Parameter]:
    """The submodule that has a parameter, its name there, and the parameter."""
    path, _, last = key.rpartition(".")
    owner = module.get_submodule(path)
    parameter = parameters_of(owner)[last]
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
    """Collects the gradient of the whole parameter, after the backward pass of all its parts."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, stored: Stored) -> Tensor:
        ctx.stored = stored
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.stored.collected(), None


class _Part(torch.autograd.Function):
    """Rows of a parameter: a single expert, or all."""

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
