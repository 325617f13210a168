"""One kind of an optimizer's tensors, under the names and in the shapes of the model's files.

The class may have in one parameter what files hold in several tensors, experts above all.
Moments are taken apart as transformers takes weights apart when it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import TensorInfo, Weights, cut
from growkit.engine.class_weights import Unconverted, one_row, stacks
from growkit.engine.loader import Conversion
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.state import ORDERS, State

if TYPE_CHECKING:
    from torch import Tensor


def moments_dtype(dtype: str) -> str:
    """That in which moments grow: of float16, squares that are divided would become zero."""
    return "F32" if dtype == "F16" else dtype


class OfKind(Weights):
    """A checkpoint of moments; see ``growkit.checkpoint.tensors.Weights``.

    Args:
        state: of the optimizer.
        kind: of its tensors.
        parameters: of the model.
        weights: the model's own tensors.
    """

    def __init__(self, state: State, kind: str, parameters: Parameters, weights: Weights) -> None:
        self._state, self._kind = state, kind
        self.config = weights.config
        self._unconverted = Unconverted(weights.tensors)
        numbers = state.numbers.tensors
        self._conversions: dict[str, Conversion] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for each in parameters.conversions:
            if any(f"{name}.{kind}" not in numbers for name in each.shapes):
                continue
            part = each
            if each.transform is not None:
                part = one_row(each, 0) if stacks(each) else each
                if self._unconverted.places(part) is None:
                    continue
            dtype = moments_dtype(numbers[f"{next(iter(each.shapes))}.{kind}"].dtype)
            for tensor in each.sources:
                self._conversions[tensor] = each
                self.tensors[tensor] = TensorInfo(weights.tensors[tensor].shape, dtype)

    def where(self, name: str | None = None) -> str:
        """The file or folder of the state."""
        return str(self._state.where)

    def cuts(self, name: str) -> int:
        """As the state's, where the class has the tensor as it is."""
        conversion = self._conversions[name]
        (first, *_) = conversion.shapes
        key = f"{first}.{self._kind}"
        return self._state.numbers.cuts(key) if conversion.transform is None else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor.

        Raises:
            InputError: it holds what such moments cannot be.
        """
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._numbers(next(iter(conversion.shapes)), *where)
        part: slice | None = None
        if stacks(conversion):
            number = next(n.index(name) for n in conversion.tensors.values() if name in n)
            conversion, part = one_row(conversion, number), slice(number, number + 1)
        made = {each: self._numbers(each, part) for each in conversion.shapes}
        found = self._unconverted(conversion, made)
        assert found is not None, f"{name} has no way back"
        return cut(dict(found)[name], where)

    def _numbers(self, parameter: str, *where: slice | None) -> Tensor:
        found = self._state.numbers.read(f"{parameter}.{self._kind}", *where)
        wrong = "NaN or infinity" if not found.isfinite().all() else ""
        if not wrong and ORDERS[self._kind] == 2 and found.numel() and found.min() < 0:
            wrong = "negative squares"
        if wrong:
            raise InputError(
                f"{self._kind} of {parameter} in {self._state.where} holds {wrong}; use the state "
                "of an earlier checkpoint"
            )
        return found.float() if str(found.dtype) == "torch.float16" else found
