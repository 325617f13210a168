"""Trace numbers through a running model.

A product of matrices sums over a dimension of a parameter: the parameter reads that dimension.
Dimensions whose elements are multiplied, added or compared one by one belong to one space. The
stream of a layer is its input hidden states and everything that is added to them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from growkit.base.torch_internals import TorchDispatchMode
from growkit.extras.family_inference.small_model import stored_tensors

Place = tuple[str, int]
"""A parameter and one of its dimensions."""

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "mv": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2)}
"""Positions of the two factors among the arguments of torch's matrix products."""

SUMS = frozenset({"add", "sub"})
KEEPING = frozenset({"_to_copy", "clone", "div", "mul"})
"""Operations that keep a stream if it is the only tensor: copies, and products with a number."""


class Flow(TorchDispatchMode):
    """Records what happens to the dimensions of parameters.

    Attributes:
        reads: dimensions that products sum over, or that are looked up.
        stacks: dimensions along which matrices are stacked and used one at a time.
        gains: parameters by which a stream is multiplied.
        added: parameters that are zero if nothing is added to a stream.
        used: parameters whose numbers were used.
        factors: by parameter, the product of all scalars that multiply its input or output, in all
            calls of its module.
        calls: by parameter, the number of calls of its module.
        uses: by parameter, the number of operations that used its numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: set[Place] = set()
        self.stacks: set[Place] = set()
        self.used: set[str] = set()
        self.factors: dict[str, float] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets their memory
        self._parameters: dict[int, list[tuple[int, int, Place]]] = {}
        self._made: dict[int, list[tuple[int, int, Place]]] = {}
        self.gains: set[str] = set()
        self.added: set[str] = set()
        self._stream: dict[int, bool] = {}  # and whether a norm was applied to it
        self._makers: dict[int, set[str]] = {}
        self._times: dict[int, float] = {}
        self._joined: dict[Place, Place] = {}
        self.calls: Counter[str] = Counter()
        self.uses: Counter[str] = Counter()
        for name, tensor in stored_tensors(model).items():
            self._name(tensor, [(name, at) for at in range(tensor.dim())])
        for prefix, module in model.named_modules():
            if own := [name for name, _ in module.named_parameters(prefix, recurse=False)]:
                module.register_forward_pre_hook(partial(self._count, own))

    def _count(self, names: Iterable[str], *_: Any) -> None:
        self.calls.update(names)

    # Spaces.

    def space(self, tensor: torch.Tensor, at: int) -> Place | None:
        """The space of a dimension of a tensor; None if no parameter has that space."""
        place = self._of_parameter(tensor, at)
        if place is None and tensor.shape[at] > 1:
            dimension = tensor.stride(at), tensor.shape[at]
            known = self._made.get(_memory(tensor), [])
            place = next((candidate for *like, candidate in known if (*like,) == dimension), None)
        return place and self.root(place)

    def root(self, place: Place) -> Place:
        """The representative dimension of a space."""
        while place in self._joined:
            place = self._joined[place]
        return place

    def _join(self, places: Sequence[Place | None]) -> Place | None:
        roots = [self.root(member) for member in places if member]
        for place in roots[1:]:
            if self.root(place) != roots[0]:
                self._joined[self.root(place)] = roots[0]
        return roots[0] if roots else None

    # Streams.

    def begin_stream(self, tensor: torch.Tensor) -> None:
        """Start the stream of the next layer with hidden states."""
        self._stream = {_memory(tensor): False}

    def is_stream(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to the stream of the current layer."""
        return _memory(tensor) in self._stream

    def keep_normed(self, tensor: torch.Tensor) -> None:
        """Treat the output of a norm of the stream as part of the stream."""
        self._stream[_memory(tensor)] = True

    # Operations of torch.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        operation = func.overloadpacket.__name__
        inputs = [*_floating(args), *_floating((kwargs or {}).values())]
        if operation.endswith("_like") or operation.startswith("new_"):  # only the shape is used
            inputs = []
        self._follow_spaces(operation, args, inputs, output)
        self._follow_numbers(operation, args, inputs, output)
        return output

    def _follow_spaces(self, operation: str, args: Any, inputs: list[Any], output: Any) -> None:
        if operation in PRODUCTS:
            one, other = (args[at] for at in PRODUCTS[operation])
            self._multiply(one, other, args[0], output)
        elif operation == "embedding":
            self._read(args[0], 0)
            self._keep(output, [*[None] * (output.dim() - 1), self.space(args[0], 1)])
        elif operation == "convolution":
            self._convolve(args[0], args[1], args[8], output)
        elif operation in ("select", "unbind"):
            if inputs and inputs[0].dim() > 2:
                self._stack(inputs[0], args[1] if len(args) > 1 else 0)
        else:
            for outcome in _floating([output]):
                self._keep_stream(inputs, outcome, operation.removesuffix("_"))
                self._join_elementwise(inputs, outcome, operation)

    def _follow_numbers(self, operation: str, args: Any, inputs: list[Any], output: Any) -> None:
        learned = {name for tensor in inputs for name in self._named(tensor)}
        self.used |= learned
        if learned:
            self._follow_parameters(learned, inputs, output, operation.removesuffix("_") in SUMS)
        elif operation.removesuffix("_") in KEEPING:
            self._follow_factor(inputs, args, output, operation.startswith("div"))
        elif operation.endswith("_") and isinstance(output, torch.Tensor):
            self._makers.pop(_memory(output), None)

    def _multiply(self, one: Any, other: Any, added: Any, output: torch.Tensor) -> None:
        for tensor, at in ((one, -1), (other, -2 if other.dim() > 1 else -1)):
            self._read(tensor, at)
            if tensor.dim() > 2:
                self._stack(tensor, 0)
        self._join([self.space(one, -1), self.space(other, -2 if other.dim() > 1 else -1)])
        spaces = [None] * max(output.dim() - 2, 0) + [self.space(one, -2)]
        if other.dim() > 1:
            spaces.append(self.space(other, -1))
            if added is not one and added.shape[-1:] == output.shape[-1:]:
                self._join([spaces[-1], self.space(added, -1)])
        self._keep(output, spaces)

    def _convolve(self, inputs: Any, weight: Any, groups: int, output: torch.Tensor) -> None:
        spaces: list[Place | None] = [None] * output.dim()
        if groups == 1:
            self._read(weight, 1)
            self._join([self.space(inputs, 1), self.space(weight, 1)])
            spaces[1] = self.space(weight, 0)
        else:
            spaces[1] = self._join([self.space(inputs, 1), self.space(weight, 0)])
        self._keep(output, spaces)

    def _join_elementwise(self, inputs: list[Any], output: torch.Tensor, operation: str) -> None:
        spaces: list[Place | None] = []
        for at in range(-output.dim(), 0):
            along = [t for t in inputs if t.dim() >= -at and t.shape[at] == output.shape[at]]
            spaces.append(self._join([self.space(tensor, at) for tensor in along]))
        arrays = [tensor for tensor in inputs if tensor.numel() > 1]
        like = [tensor for tensor in arrays if tensor.shape == output.shape]
        copied = [self._of_parameter(like[0], at) for at in range(output.dim())] if like else []
        if arrays == like[:1] and any(copied) and _memory(output) not in self._parameters:
            self._name(output, copied)  # in another dtype, say
        elif operation.endswith("_") or _memory(output) not in map(_memory, inputs):
            self._keep(output, spaces)

    def _keep_stream(self, inputs: list[Any], output: torch.Tensor, operation: str) -> None:
        """Follow a stream that is copied, added to, or multiplied by a number or a parameter."""
        like = [_memory(tensor) for tensor in inputs if tensor.shape == output.shape]
        streams = [memory for memory in like if memory in self._stream]
        learned = {name for tensor in inputs for name in self._named(tensor)}
        only_numbers = all(tensor.numel() == 1 or _memory(tensor) in streams for tensor in inputs)
        if streams and (operation in SUMS or (operation in KEEPING and (only_numbers or learned))):
            normed = all(self._stream[memory] for memory in streams)
            self._stream[_memory(output)] = normed
            if operation == "mul" and not normed:
                self.gains |= learned
            elif operation in SUMS and not normed:
                others = (tensor for tensor in inputs if _memory(tensor) not in streams)
                self.added |= {name for tensor in others for name in self._written_by(tensor)}

    def _written_by(self, tensor: torch.Tensor) -> set[str]:
        """The parameters that make a tensor, or else all that write to its space."""
        if makers := self._makers.get(_memory(tensor)):
            return makers
        space = self.space(tensor, -1) if tensor.dim() else None
        places = {*self._joined, *([space] if space else [])} - self.reads
        return {name for name, at in places if self.root((name, at)) == space}

    # Factors.

    def _follow_parameters(
        self, learned: set[str], inputs: list[Any], output: Any, adds: bool
    ) -> None:
        """Record the parameters that make a tensor, and the scale of the tensor that they read."""
        self.uses.update(learned)
        makers = set(learned)
        for tensor in inputs:
            self._scale(learned, self._times.get(_memory(tensor), 1.0))
            if adds:  # a bias, to the product with its weight
                makers |= self._makers.get(_memory(tensor), set())
        for tensor in _floating([output]):
            self._makers[_memory(tensor)] = makers

    def _follow_factor(self, inputs: list[Any], args: Any, output: Any, divides: bool) -> None:
        """Record that a tensor is multiplied by a scalar."""
        (tensor, *others) = [tensor for tensor in inputs if tensor.numel() > 1] or [None]
        if tensor is None or others:
            return
        numbers = [value for value in args[1:2] if isinstance(value, int | float)]
        numbers += [
            float(t) for t in inputs if t.numel() == 1 and _memory(t) not in self._parameters
        ]
        factor = prod(numbers) or 1.0
        factor = 1 / factor if divides else factor
        if makers := self._makers.get(_memory(tensor)):
            self._scale(makers, factor)
            self._makers[_memory(output)] = makers
        else:
            self._times[_memory(output)] = self._times.get(_memory(tensor), 1.0) * factor

    def _scale(self, parameters: Iterable[str], factor: float) -> None:
        for name in parameters:
            self.factors[name] = self.factors.get(name, 1.0) * factor

    # Dimensions of tensors.

    def _named(self, tensor: torch.Tensor) -> set[str]:
        """The parameter that a tensor is, or is a view of."""
        return {name for *_, (name, _) in self._parameters.get(_memory(tensor), [])}

    def _read(self, tensor: torch.Tensor, at: int) -> None:
        if (place := self._of_parameter(tensor, at)) is not None:
            self.reads.add(place)

    def _stack(self, tensor: torch.Tensor, at: int) -> None:
        if (place := self._of_parameter(tensor, at)) is not None:
            self.stacks.add(place)

    def _of_parameter(self, tensor: torch.Tensor, at: int) -> Place | None:
        """The dimension of a parameter that a dimension of a view of it corresponds to."""
        if not tensor.dim() or tensor.shape[at] < 2:
            return None
        known = self._parameters.get(_memory(tensor), [])
        fitting = [
            dimension
            for dimension in known
            if dimension[1] > 1 and dimension[0] <= tensor.stride(at)
        ]
        return max(fitting)[2] if fitting else None

    def _name(self, tensor: torch.Tensor, places: Sequence[Place | None]) -> None:
        if tensor.numel():
            self._kept.append(tensor)
            dimensions = zip(tensor.stride(), tensor.shape, places, strict=True)
            self._parameters[_memory(tensor)] = [(s, n, p) for s, n, p in dimensions if p]

    def _keep(self, tensor: torch.Tensor, spaces: Sequence[Place | None]) -> None:
        self._kept.append(tensor)
        dimensions = zip(tensor.stride(), tensor.shape, spaces, strict=True)
        known = self._made.setdefault(_memory(tensor), [])
        known += [
            (s, n, place) for s, n, place in dimensions if place and (s, n, place) not in known
        ]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _floating(values: Any) -> Iterator[torch.Tensor]:
    """All floating-point tensors, including those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, list | tuple):
            yield from _floating(value)
