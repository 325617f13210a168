"""Checkpoints on disk: read lazily, written streamed, published when proved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Config = dict[str, Any]
"""The contents of a ``config.json``."""

FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per element of every float dtype, by its safetensors name."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The torch (and ``config.json``) name of every float dtype, by its safetensors name."""

ELEMENT_BYTES = FLOAT_BYTES | {
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
}
"""Bytes per element of every dtype that can be read; models are grown in those above alone."""

STORED_NAMES = TORCH_NAMES | {
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The torch name of each of these."""

AT_ONCE = 1 << 24
"""Elements of a tensor that are looked at a time, where it need not be whole."""


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: its shape and its dtype (a safetensors name)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return self.elements * _bits(self.dtype) // 8


def _bits(dtype: str) -> int:
    """Of an element; names of dtypes begin with them, but for BOOL, which takes a byte."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


class Weights(Protocol):
    """A checkpoint, on disk or yet to be computed: what is known from headers, and the tensors."""

    @property
    def config(self) -> Config:
        """The contents of ``config.json``."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The header of every tensor, by name."""
        ...

    def where(self, name: str | None = None) -> str:
        """The file that a tensor comes from, or the folder they all come from; for messages."""
        ...

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor, as consecutive blocks along dimension 0."""
        ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """A whole tensor, or some of its rows, or of these some columns (of dimension 1)."""
        ...

    def by_rows(self, name: str) -> bool:
        """Whether some rows of a tensor are had without the others."""
        ...


def cut(tensor: Tensor, rows: slice | None, columns: slice | None = None) -> Tensor:
    """Some rows, and of these some columns; None for all of them."""
    some = tensor if rows is None else tensor[rows]
    return some if columns is None else some[:, columns]


def total_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Size of the data of all tensors."""
    return sum(info.bytes for info in tensors.values())


def parts(weights: Weights, name: str, elements: int | None = None) -> list[slice]:
    """Rows of a tensor to be looked at a time: of a large one, ``AT_ONCE`` elements.

    Args:
        weights: has the tensor.
        name: of the tensor.
        elements: how many are looked at for the whole of it, if they are not only its own.
    """
    info = weights.tensors[name]
    rows = info.shape[0] if info.shape else 1
    each = -(-(elements or info.elements) // max(rows, 1))
    count = max(1, AT_ONCE // max(1, each)) if weights.by_rows(name) else max(rows, 1)
    return [slice(begin, min(begin + count, rows)) for begin in range(0, rows, count)]


def total_parameters(tensors: Mapping[str, TensorInfo]) -> int:
    """Number of elements of all tensors."""
    return sum(info.elements for info in tensors.values())


def main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The float dtype that holds most of the parameters."""
    elements: dict[str, int] = {"F32": 0}  # where nothing is a float
    for info in tensors.values():
        if info.dtype in FLOAT_BYTES:
            elements[info.dtype] = elements.get(info.dtype, 0) + info.elements
    return max(elements, key=lambda dtype: elements[dtype])
