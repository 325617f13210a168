"""A checkpoint under the names and in the shapes that the class has, one parameter at a time.

Files may call tensors otherwise than the class, or hold in several what it has in one: experts, or
queries, keys and values. Transformers converts them while it loads; the same conversions are run
here when a parameter is needed, on its own tensors alone.
"""

from __future__ import annotations

from copy import copy
from functools import reduce

import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import STORED_NAMES, TensorInfo, Weights, cut
from growkit.engine.loader import Conversion, the_tensor

NAMES = {torch_name: name for name, torch_name in STORED_NAMES.items()}
"""The safetensors name of every dtype, by torch's."""


class ClassWeights(Weights):
    """A checkpoint, tensors of which are what transformers would make of those in its files.

    Args:
        checkpoint: the files.
        conversions: how transformers makes parameters and buffers of them.
    """

    def __init__(self, checkpoint: Checkpoint, conversions: tuple[Conversion, ...]) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._conversions = {name: each for each in conversions for name in each.shapes}
        self._dtypes = {name: self._dtype(each) for name, each in self._conversions.items()}
        self.tensors = {
            name: TensorInfo(each.shapes[name], NAMES[str(self._dtypes[name]).split(".")[-1]])
            for name, each in self._conversions.items()
        }

    def stored_as(self, name: str) -> str | None:
        """The tensor in the files that a parameter is, but for its name; None if it is none."""
        conversion = self._conversions.get(name)
        plain = conversion is not None and conversion.transform is None
        return conversion.sources[0] if conversion and plain else None

    def where(self, name: str | None = None) -> str:
        """The file with the first tensor that a parameter is made of; the folder if none is."""
        return self._checkpoint.where(self._conversions[name].sources[0] if name else None)

    def cuts(self, name: str) -> int:
        """As a tensor that is stored; experts one by one."""
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._checkpoint.cuts(conversion.sources[0])
        return int(stacks(conversion))

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a parameter, in the dtype in which it is stored."""
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._checkpoint.read(conversion.sources[0], *where)
        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            if stacks(conversion):
                rows, *rest = where or (None,)
                return cut(self._stacked(name, conversion, rows), (None, *rest))
            return cut(self._made(name, conversion, conversion.tensors), where)

    def _stacked(self, name: str, conversion: Conversion, rows: slice | None) -> Tensor:
        """Some rows, each made of tensors of its own: never are all in memory twice."""
        shape = conversion.shapes[name]
        places = range(shape[0])[rows or slice(None)]
        found = torch.empty(len(places), *shape[1:], dtype=self._dtypes[name])
        for row, place in zip(found, places, strict=True):
            own = {pattern: [names[place]] for pattern, names in conversion.tensors.items()}
            row.copy_(self._made(name, conversion, own)[0])
        return found

    def _made(self, name: str, conversion: Conversion, tensors: dict[str, list[str]]) -> Tensor:
        """What transformers makes of tensors."""
        read = {
            pattern: [self._checkpoint.read(each).to(self._dtypes[name]) for each in names]
            for pattern, names in tensors.items()
        }
        return converted(conversion, read)[name]

    def _dtype(self, conversion: Conversion) -> torch.dtype:
        """The narrowest dtype in which none of the tensors loses anything."""
        infos = [self._checkpoint.tensors[each] for each in conversion.sources]
        dtypes: list[torch.dtype] = [getattr(torch, STORED_NAMES[each.dtype]) for each in infos]
        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            return reduce(torch.promote_types, dtypes)


def converted(conversion: Conversion, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """What transformers makes of tensors, by name; they are given by the transform's pattern."""
    transform = copy(conversion.transform)  # which collects tensors, and lets go of them
    transform.collected_tensors = tensors
    model = conversion.model
    made = transform.convert(conversion.name, model=model, config=model.config)
    return {name: the_tensor(each) for name, each in made.items()}


def taken_apart(conversion: Conversion, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round: what tensors in files were, of which transformers has made others.

    Args:
        conversion: of all tensors; where it ``stacks``, ``made`` may be some rows alone.
        made: tensors by their names in the class.

    Returns:
        By the names in files; of rows by those of the first ones.

    Raises:
        Exception: transformers has no way back.
    """
    back = conversion.transform.reverse_transform()
    of = {
        pattern: [tensor]
        for pattern in back.source_patterns
        for name, tensor in made.items()
        if name.endswith(pattern) or len(made) == 1
    }
    back.collected_tensors = of
    model = conversion.model
    found = back.convert(conversion.name, model=model, config=model.config)
    return {
        name: the_tensor(found[pattern.replace("*", str(number))])
        for pattern, names in conversion.tensors.items()
        for number, name in enumerate(names)
        if pattern.replace("*", str(number)) in found
    }


def stacks(conversion: Conversion) -> bool:
    """Whether every row of what is made has tensors of its own, as experts one by one have."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = conversion.transform.operations
    counts = {len(names) for names in conversion.tensors.values()}
    rows = {shape[0] for shape in conversion.shapes.values() if shape}
    return (
        (type(first) is MergeModulelist and first.dim == 0)
        and all(type(each) is Concatenate and each.dim > 0 for each in others)
        and counts == rows
    )
