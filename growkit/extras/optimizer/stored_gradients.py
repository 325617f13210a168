"""Gradients and moments of a class's parameters, as those of the tensors in the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from growkit.base.tensors import TensorInfo
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.class_weights import converted, one_row, stacks
from growkit.engine.loader import Conversion, by_parameter, loading
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.own_class import substitute

Named = tuple[str, Tensor]


class Unconverted:
    """Inverts the conversions that transformers does while it loads.

    Converting numbered elements shows the source of each element of the result.

    Args:
        tensors: headers of the tensors in the files.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._places: dict[object, Tensor | None] = {}

    def places(self, conversion: Conversion) -> Tensor | None:
        """Index into the concatenated source elements, for each element of the result.

        None if the conversion does more than move elements.
        """
        shapes = [self._tensors[name].shape for name in conversion.sources]
        key = (*conversion.tensors, *shapes)  # layers and experts are alike
        if key not in self._places:
            with stored_dtypes():
                self._places[key] = _places(conversion, shapes)
        return self._places[key]

    def __call__(
        self, conversion: Conversion, parameters: Mapping[str, Tensor]
    ) -> list[Named] | None:
        """Recover the source tensors from a conversion's results; None if it is not invertible."""
        if any(tuple(parameters[name].shape) != shape for name, shape in conversion.shapes.items()):
            return None
        places = self.places(conversion)
        if places is None:
            return None
        with stored_dtypes():
            together = torch.cat([parameters[name].flatten() for name in conversion.shapes])
            back = torch.empty_like(together)
            back[places.to(back.device)] = together
        shapes = [self._tensors[name].shape for name in conversion.sources]
        return list(zip(conversion.sources, _split(back, shapes), strict=True))


def _places(conversion: Conversion, shapes: list[tuple[int, ...]]) -> Tensor | None:
    # Indices as float64, the widest dtype, pass through any conversion.
    indices = torch.arange(sum(map(prod, shapes)), dtype=torch.float64)
    parts = _split(indices, shapes)
    tensors = conversion.tensors.items()
    by_name = converted(conversion, {key: [next(parts) for _ in names] for key, names in tensors})
    places = torch.cat([by_name[name].flatten() for name in conversion.shapes])
    return places.long() if places.sort().values.equal(indices) else None


def _split(flat: Tensor, shapes: list[tuple[int, ...]]) -> Iterator[Tensor]:
    """Split a vector into consecutive parts of these shapes."""
    parts = flat.split([prod(shape) for shape in shapes])
    return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class StoredGradients:
    """Turns gradients of a class's parameters into gradients of the tensors in the files.

    Args:
        checkpoint: the files.

    Attributes:
        lost: tensors whose gradients cannot be recovered, because transformers does more than move
            their elements.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        own = substitute(checkpoint.config)
        rules = own.plan(checkpoint).rules if own else ()
        self._rules = {rule.target: rule for rule in rules}
        self._conversions = by_parameter(loading(checkpoint).conversions)  # none with rules
        self._unconverted = Unconverted(checkpoint.tensors)
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self.lost: set[str] = set()

    def __call__(self, name: str, gradient: Tensor) -> list[Named]:
        """Names and gradients of the source tensors of a parameter.

        If the tensors become several parameters, the gradients come with the last of these.

        Args:
            name: name of a parameter.
            gradient: its gradient, of the parameter's shape; it may have fewer rows if the
                parameter is a single stored tensor.
        """
        if self._rules:
            (source,) = self._rules[name].sources
            rows = slice(0, self._checkpoint.tensors[source].shape[0])
            arranged = self._rules[name].transform.undo(gradient.__getitem__, rows)
            assert arranged is not None
            return [(source, arranged)]
        conversion = self._conversions.get(name)
        if conversion is None or conversion.transform is None:
            return [(conversion.sources[0] if conversion else name, gradient)]
        waiting = self._waiting.setdefault(id(conversion), {})
        waiting[name] = gradient
        if waiting.keys() < conversion.shapes.keys():
            return []
        del self._waiting[id(conversion)]
        parts = [(conversion, waiting)]
        if stacks(conversion):  # row by row, so memory never holds all of it twice
            parts = [
                (one_row(conversion, row), {n: g[row : row + 1] for n, g in waiting.items()})
                for row in range(len(gradient))
            ]
        gradients: list[Named] = []
        for part, of_part in parts:
            separate = self._unconverted(part, of_part)
            if separate is None:
                self.lost |= set(conversion.sources)
                return []
            gradients += separate
        return gradients
