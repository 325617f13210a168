"""One kind of an optimizer's tensors, under the names and in the shapes of the model's files.

The class may have in one parameter what files hold in several tensors, experts above all.
Transformers puts them together when it loads and takes them apart when it saves; so it does with
moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config, TensorInfo, Weights, cut
from growkit.engine.class_weights import converted, stacks, taken_apart
from growkit.engine.loader import Conversion
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.state import ORDERS, State

if TYPE_CHECKING:
    from torch import Tensor


def moments_dtype(dtype: str) -> str:
    """That in which moments grow: of float16, squares that are divided would become zero."""
    return "F32" if dtype == "F16" else dtype


@dataclass(frozen=True)
class OfKind(Weights):
    """A checkpoint of moments; see ``growkit.checkpoint.tensors.Weights``.

    Attributes:
        state: of the optimizer.
        kind: of its tensors.
        parameters: of the model.
        weights: the model's own tensors.
    """

    state: State
    kind: str
    parameters: Parameters
    weights: Weights

    @property
    def config(self) -> Config:  # type: ignore[override]
        """That of the model."""
        return self.weights.config

    @cached_property
    def _conversions(self) -> dict[str, Conversion]:
        """For each tensor in files how the class makes a parameter of it."""
        known = self.state.numbers.tensors
        return {
            tensor: each
            for each in self.parameters.conversions
            if all(self._key(name) in known for name in each.shapes)
            and (each.transform is None or self._has_a_way_back(each))
            for tensor in each.sources
        }

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:  # type: ignore[override]
        """The header of each."""
        numbers, weights = self.state.numbers.tensors, self.weights.tensors
        return {
            tensor: TensorInfo(
                weights[tensor].shape,
                moments_dtype(numbers[self._key(next(iter(each.shapes)))].dtype),
            )
            for tensor, each in self._conversions.items()
        }

    def where(self, name: str | None = None) -> str:
        """The file or folder of the state."""
        return str(self.state.where)

    def cuts(self, name: str) -> int:
        """As the state's, where the class has the tensor as it is."""
        conversion = self._conversions[name]
        key = self._key(next(iter(conversion.shapes)))
        return self.state.numbers.cuts(key) if conversion.transform is None else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor.

        Raises:
            InputError: it holds what such moments cannot be.
        """
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._numbers(next(iter(conversion.shapes)), *where)
        if stacks(conversion):
            number = next(n.index(name) for n in conversion.tensors.values() if name in n)
            own = {pattern: [names[number]] for pattern, names in conversion.tensors.items()}
            part: slice | None = slice(number, number + 1)
        else:
            own, part = conversion.tensors, None
        made = {each: self._numbers(each, part) for each in conversion.shapes}
        alone = Conversion(conversion.transform, conversion.name, conversion.model, own)
        found = taken_apart(alone, made)
        again = converted(alone, {p: [found[n] for n in names] for p, names in own.items()})
        assert all(again[each].equal(made[each]) for each in made), f"{name} has no way back"
        return cut(found[name], where)

    def _key(self, parameter: str) -> str:
        return f"{parameter}.{self.kind}"

    def _numbers(self, parameter: str, *where: slice | None) -> Tensor:
        found = self.state.numbers.read(self._key(parameter), *where)
        wrong = "NaN or infinity" if not found.isfinite().all() else ""
        if not wrong and ORDERS[self.kind] == 2 and found.numel() and found.min() < 0:
            wrong = "negative squares"
        if wrong:
            raise InputError(
                f"{self.kind} of {parameter} in {self.state.where} holds {wrong}; use the state of "
                "an earlier checkpoint"
            )
        return found.float() if str(found.dtype) == "torch.float16" else found

    def _has_a_way_back(self, conversion: Conversion) -> bool:
        """Whether what transformers makes of tensors can be taken apart, tried without numbers."""
        import torch

        made = {name: torch.empty(s, device="meta") for name, s in conversion.shapes.items()}
        try:
            found = taken_apart(conversion, made)
        except Exception:  # whatever it is, there is none
            return False
        weights = self.weights.tensors
        return found.keys() == set(conversion.sources) and all(
            tuple(tensor.shape) == weights[name].shape for name, tensor in found.items()
        )
