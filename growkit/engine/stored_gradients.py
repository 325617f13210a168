"""Gradients of a class's parameters as gradients of the tensors in the files.

Where transformers puts the tensors of files together while it loads them, the same conversion of
numbered elements says which element came from where; gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import converted, stacks
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout

Named = tuple[str, Tensor]


class StoredGradients:
    """Hands gradients on under the names and in the shapes of the files.

    Args:
        checkpoint: the files.

    Attributes:
        lost: tensors whose gradients are not told by those of the parameters they become: what
            transformers makes of them is more than their elements in other places.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._rules = {}
        self._conversions: dict[str, Conversion] = {}
        if lacks_class(checkpoint.config):
            self._rules = {rule.target: rule for rule in read_layout(checkpoint).rules}
        else:
            conversions = loading(checkpoint).conversions
            self._conversions = {name: each for each in conversions for name in each.shapes}
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self.lost: set[str] = set()

    def __call__(self, name: str, gradient: Tensor) -> list[Named]:
        """The names and gradients of the tensors that a parameter is made of.

        Of tensors that become several parameters, they come with the last of these.

        Args:
            name: of a parameter.
            gradient: of the parameter's shape; where no tensors are put together, it may be of
                some rows alone.
        """
        if self._rules:
            (source,) = self._rules[name].sources
            rows = slice(0, self._checkpoint.tensors[source].shape[0])
            arranged = self._rules[name].transform.undo(gradient.__getitem__, rows)
            assert arranged is not None
            return [(source, arranged)]
        conversion = self._conversions.get(name)
        if conversion is None:
            return [(name, gradient)]
        if conversion.transform is None:
            return [(conversion.sources[0], gradient)]
        waiting = self._waiting.setdefault(id(conversion), {})
        waiting[name] = gradient
        if waiting.keys() < conversion.shapes.keys():
            return []
        del self._waiting[id(conversion)]
        found = self._taken_apart(conversion, waiting)
        if found is None:
            self.lost |= set(conversion.sources)
        return found or []

    def _taken_apart(
        self, conversion: Conversion, gradients: Mapping[str, Tensor]
    ) -> list[Named] | None:
        if any(conversion.shapes[name] != each.shape for name, each in gradients.items()):
            return None
        if not stacks(conversion):
            return self._put_back(conversion, conversion.tensors, gradients)
        found: list[Named] = []
        for place in range(len(next(iter(gradients.values())))):  # never is all of it there twice
            own = {pattern: [names[place]] for pattern, names in conversion.tensors.items()}
            rows = {name: each[place : place + 1] for name, each in gradients.items()}
            one = self._put_back(conversion, own, rows)
            if one is None:
                return None
            found += one
        return found

    def _put_back(
        self,
        conversion: Conversion,
        tensors: Mapping[str, list[str]],
        gradients: Mapping[str, Tensor],
    ) -> list[Named] | None:
        """The gradients of tensors, from all that is made of them."""
        shapes = {n: self._checkpoint.tensors[n].shape for names in tensors.values() for n in names}
        sizes = [prod(shape) for shape in shapes.values()]
        # As numbers of the widest dtype, they pass through whatever a conversion may do.
        numbers = torch.arange(sum(sizes), dtype=torch.float64).split(sizes)
        numbered = {n: each.view(shapes[n]) for n, each in zip(shapes, numbers, strict=True)}
        given = {pattern: [numbered[n] for n in names] for pattern, names in tensors.items()}
        with torch._C.DisableTorchFunction():
            made = converted(conversion, given)
            places = torch.cat([made[name].flatten() for name in gradients])
            if not places.sort().values.equal(torch.cat(numbers)):
                return None
            together = torch.cat([each.flatten() for each in gradients.values()])
            back = torch.empty_like(together)
            back[places.long().to(back.device)] = together
        return [
            (name, each.view(shapes[name]))
            for name, each in zip(shapes, back.split(sizes), strict=True)
        ]
