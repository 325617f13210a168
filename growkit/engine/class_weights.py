"""A checkpoint in the form of its model class: an empty model, and its weights one by one.

Files may use other names than the class, or several tensors for one parameter: experts, or queries,
keys and values. transformers converts them while it loads. Here the same conversions run for one
parameter at a time, on its own tensors alone, and in reverse for gradients and moments.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import foreign
from growkit.base.tensors import SAFETENSORS_NAMES, Config, TensorInfo, cut
from growkit.base.torch_internals import stored_dtypes
from growkit.engine import transformers_class
from growkit.engine.loader import (
    Conversion,
    by_parameter,
    check_class,
    dequantises,
    loading,
    the_tensor,
)
from growkit.engine.transformers_internals import own_dtypes, uninitialised
from growkit.model.checkpoint.reading import Checkpoint, outlined
from growkit.model.model import Model
from growkit.planning.own_class import runnable

OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Config keys that request further outputs, and do not change the logits."""


class Extended(Model, ABC):
    """The weights of a model to which something is added once its class has built it."""

    @abstractmethod
    def extend(self, model: Any) -> None:
        """Add it to the model, which has no weights yet; afterwards, these have a tensor for each
        parameter of the model, by its name there.
        """


def empty_model(weights: Model, dtype: torch.dtype) -> tuple[Any, Model, Callable[[str], str]]:
    """Build the model of a checkpoint without its weights; the class computes the buffers.

    Args:
        weights: a checkpoint, on disk or planned.
        dtype: dtype of the parameters, except those that the class keeps in another.

    Returns:
        The model; its weights under the class's names; and a function from the name of a parameter
        to the name of its stored tensor, which differs if the parameter is tied.

    Raises:
        InputError: transformers does not know the model, or a tensor is missing or does not fit.
    """
    names, weights = weights.tensors, class_weights(weights)
    model = build(weights, weights.config, dtype)
    if isinstance(weights, Extended):
        weights.extend(model)
    model.eval()
    buffers = persistent_buffers(model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    # Some parameters and buffers stay float32, regardless of the dtype the class is loaded in.
    wide = own_dtypes(model, dtype)
    for name, tensor in tensors.items():
        patterns = (key for key in wide if re.search(key.replace("*", ".*"), name))
        tensor.data = tensor.data.to(next((wide[key] for key in patterns), tensor.dtype))
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}

    def stored(name: str) -> str:
        """Find the stored one of several tied parameters, which may be any of them."""
        alike = tied_names(name, tied)
        return next((alias for alias in alike if alias in weights.tensors), alike[1])

    for name, tensor in tensors.items():
        info = weights.tensors.get(stored(name))
        if info is None and name in buffers:
            continue  # as in transformers, the class computes it
        if info is None or info.shape != tuple(tensor.shape):
            what = "missing keys" if info is None else "mismatched keys"
            raise transformers_class.unread_weights(model, what, weights.where(), name, names)
    return model, weights, stored


def tied_names(name: str, tied: Mapping[str, str]) -> tuple[str, ...]:
    """The names of all parameters tied to a parameter: its own, that of its source, and the rest.

    Args:
        name: name of the parameter.
        tied: the source of every parameter that is tied to another.
    """
    source = tied.get(name, name)
    return (name, source, *(other for other, of in tied.items() if of == source))


def class_weights(weights: Model) -> Model:
    """The weights of a checkpoint, on disk or planned, under the names of its class."""
    weights = runnable(weights)
    if isinstance(weights, Checkpoint):
        return ClassWeights(weights, loading(weights).conversions)
    return weights


def build(weights: Model, config: Config, dtype: torch.dtype) -> Any:
    """Build the model of a config without weights; the class computes the buffers."""
    from transformers import AutoModelForCausalLM

    with (
        transformers_class.quiet(),
        uninitialised("meta"),
        foreign(
            f"transformers cannot build the model of {weights.where()}", "correct its config.json"
        ),
    ):
        parsed = transformers_class.parsed(config)
        check_class(parsed, weights.where())
        # A class collects the logits of its routers, say, from layers that do not run in this call.
        for key in OUTPUTS:
            if getattr(parsed, key, False):
                setattr(parsed, key, False)
        model: Any = AutoModelForCausalLM.from_config(parsed, dtype=dtype, trust_remote_code=False)
    transformers_class.fit_experts(model)
    return model


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers of a model, by name."""
    stored, buffers = model.state_dict(keep_vars=True), dict(model.named_buffers())
    return {name: tensor for name, tensor in stored.items() if name in buffers}


def planned_parameters(weights: Model, config: Config) -> tuple[ClassWeights, dict[str, str]]:
    """A planned checkpoint under its class's names, and the stored name of every parameter.

    Persistent buffers in the files are included.

    Raises:
        InputError: the checkpoint does not fit the class, or transformers has none for the model.
    """
    with outlined(weights, config) as outline:
        model, _, stored = empty_model(outline, torch.float32)
        of_class = ClassWeights(weights, loading(outline).conversions)
    names = {name: stored(name) for name in model.state_dict()}
    return of_class, {name: of for name, of in names.items() if of in of_class.tensors}


class ClassWeights(Model):
    """A checkpoint whose tensors are the parameters that transformers makes from the files.

    Args:
        checkpoint: the files.
        conversions: transformers' conversions from tensors to parameters and buffers.
    """

    def __init__(self, checkpoint: Model, conversions: tuple[Conversion, ...]) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._conversions = by_parameter(conversions)
        self.tensors = {}
        self.in_blocks = {
            name
            for conversion in conversions
            if not {*checkpoint.in_blocks}.isdisjoint(conversion.sources)
            for name in conversion.shapes
        }
        for conversion in conversions:
            # The narrowest dtype that holds all these tensors exactly.
            with stored_dtypes():
                dtypes = (checkpoint.tensors[name].torch_dtype for name in conversion.sources)
                dtype = SAFETENSORS_NAMES[str(reduce(torch.promote_types, dtypes))[6:]]
            self.tensors |= {
                name: TensorInfo(shape, dtype) for name, shape in conversion.shapes.items()
            }

    def stored_as(self, name: str) -> str | None:
        """Name of the tensor in the files that equals a parameter; None if it is converted."""
        conversion = self._conversions.get(name)
        return conversion.sources[0] if conversion and conversion.transform is None else None

    def where(self, name: str | None = None) -> str:
        """The file with a parameter's first source tensor; the folder without a name."""
        return self._checkpoint.where(self._conversions[name].sources[0] if name else None)

    def cuts(self, name: str) -> int:
        """Cuts of the stored tensor; 1 for stacked experts, and 0 for other conversions."""
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._checkpoint.cuts(conversion.sources[0])
        return int(stacks(conversion))

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor, as consecutive blocks along dimension 0."""
        plain = self.stored_as(name)
        return self._checkpoint.blocks(plain) if plain else super().blocks(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a part of a parameter, in its stored dtype."""
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._checkpoint.read(conversion.sources[0], *where)
        with stored_dtypes():  # stored dtypes, also in strict float64
            if not stacks(conversion):
                return cut(self._made(name, conversion), where)
            # Each row has source tensors of its own, so memory never holds all rows twice.
            rows, *rest = where or (None,)
            count, *others = conversion.shapes[name]
            places = range(count)[rows or slice(None)]
            selected = torch.empty(len(places), *others, dtype=self.tensors[name].torch_dtype)
            for row, place in zip(selected, places, strict=True):
                row.copy_(self._made(name, one_row(conversion, place))[0])
            return cut(selected, (None, *rest))

    def _made(self, name: str, conversion: Conversion) -> Tensor:
        """Read the source tensors of a parameter and convert them."""
        dtype = self.tensors[name].torch_dtype
        read = {
            pattern: [self._checkpoint.read(name).to(dtype) for name in names]
            for pattern, names in conversion.tensors.items()
        }
        return converted(conversion, read)[name]


def converted(conversion: Conversion, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Convert tensors, grouped by the transform's pattern, to the class's parameters, by name."""
    transform = copy(conversion.transform)  # a transform collects tensors, and drops them
    transform.collected_tensors = dict(tensors)
    model = conversion.model
    parameters = transform.convert(conversion.name, model=model, config=model.config)
    return {name: the_tensor(tensor) for name, tensor in parameters.items()}


def stacks(conversion: Conversion) -> bool:
    """Whether every row of the result has source tensors of its own, as with separate experts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = [
        operation for operation in conversion.transform.operations if not dequantises(operation)
    ]
    counts = {len(names) for names in conversion.tensors.values()}
    return (
        any(
            type(operation) is MergeModulelist and operation.dim == 0
            for operation in operations[:1]
        )
        and all(
            type(operation) is Concatenate and operation.dim > 0 for operation in operations[1:]
        )
        and counts == {shape[0] for shape in conversion.shapes.values() if shape}
    )


def one_row(conversion: Conversion, place: int) -> Conversion:
    """The part of a stacking conversion that makes a single row; see ``stacks``."""
    tensors = {pattern: [names[place]] for pattern, names in conversion.tensors.items()}
    shapes = {name: (1, *shape[1:]) for name, shape in conversion.shapes.items()}
    return replace(conversion, tensors=tensors, shapes=shapes)
