"""Tensors by name: headers, parts and sizes, independent of where the data is stored."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from growkit.base.lazy import Tensor, torch

Config = dict[str, Any]
"""The contents of a ``config.json``."""

QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Config keys of quantised models, the last one of MLX."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The torch (and ``config.json``) name of every float dtype, by its safetensors name."""

FLOAT_BITS = {
    "F64": (11, 52),
    "F32": (8, 23),
    "BF16": (8, 7),
    "F16": (5, 10),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
}
"""Number of bits of the exponent and of the fraction, by safetensors name."""

INTEGERS = {f"{k[0].upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (64, 32, 16, 8)}

STORED_NAMES = {
    **TORCH_NAMES,
    **INTEGERS,
    "BOOL": "bool",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""Torch name of every readable dtype; models are grown only in float dtypes."""

SAFETENSORS_NAMES = {torch_name: name for name, torch_name in STORED_NAMES.items()}
"""Safetensors name of every readable dtype, by its torch name."""


AT_ONCE = 1 << 24
"""Number of elements to read at a time from a large tensor."""

AT_A_TIME = 1 << 20
"""Number of elements to compute at a time: few enough to stay in a core's cache."""

WORD = 8
"""Bytes to compare at a time in tensors whose size is a multiple of it."""

ANYWHERE = 1 << 10
"""Value of ``Weights.cuts`` if every dimension can be cut."""

Where = Sequence[slice | None]
"""A part of a tensor, by dimension; None or a missing entry selects a whole dimension."""


@dataclass(frozen=True)
class TensorInfo:
    """The header of a tensor: its shape and its dtype (a safetensors name)."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of_torch(cls, shape: Sequence[int], dtype: object) -> TensorInfo:
        """The header for a shape and a torch dtype, or its name."""
        name = str(dtype).removeprefix("torch.")
        return cls(tuple(shape), SAFETENSORS_NAMES.get(name, name))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Size of an element, from the bits in the dtype's name; one byte for BOOL."""
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) // 8 if bits else 1

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return self.elements * self.element_bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, STORED_NAMES[self.dtype])
        return dtype


FLOAT_BYTES = {name: TensorInfo((), name).element_bytes for name in TORCH_NAMES}
"""Bytes per element of every float dtype, by its safetensors name."""


class Weights:
    """Tensors by name, on disk or computed on demand: their headers, and any part of their data.

    Every readable set of tensors is a subclass: files, models, states of optimizers.

    Attributes:
        tensors: the header of every tensor, by name.
        in_blocks: names of those that are stored in blocks of few bits, and read as what these
            stand for.
    """

    tensors: Mapping[str, TensorInfo]
    in_blocks: Collection[str] = ()

    def where(self, name: str | None = None) -> str:
        """The file of a tensor, or the folder of all tensors, for messages."""
        raise NotImplementedError

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a part of a tensor.

        Args:
            name: name of the tensor.
            *where: the part; see ``Where``.
        """
        raise NotImplementedError

    def cuts(self, name: str) -> int:
        """Number of leading dimensions along which parts can be read on their own."""
        return 0

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Read a tensor as consecutive blocks along dimension 0."""
        for part in slabs(self.tensors[name].shape, min(1, self.cuts(name))):
            yield self.read(name, *part)


def widened(tensor: Tensor) -> Tensor:
    """A float8 tensor in float32, since torch cannot compute in float8; any other unchanged."""
    return tensor.float() if tensor.element_size() == 1 else tensor


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers; -0 is 0, and a NaN may equal itself."""
    if one.shape != other.shape:
        return False
    both = one, other
    words = one.dtype == other.dtype and all(map(_has_words, both))
    # Several times as fast. Equal bits are equal numbers.
    same = words and torch.equal(*(t.contiguous().flatten().view(torch.int64) for t in both))
    return same or widened(one).equal(widened(other))


def _has_words(tensor: Tensor) -> bool:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.nbytes % WORD == begin % WORD == 0


def full(shape: Sequence[int], where: Where = ()) -> list[slice]:
    """Convert a part of a tensor to slices with begin and end in every dimension."""
    pairs = zip(shape, (*where, *[None] * len(shape)), strict=False)
    bounds = ((part or slice(None)).indices(size)[:2] for size, part in pairs)
    return [slice(start, max(start, end)) for start, end in bounds]


def cut(tensor: Tensor, where: Where) -> Tensor:
    """Cut a part out of a tensor in memory."""
    if not any(where):
        return tensor
    return tensor[tuple(part or slice(None) for part in where[: tensor.dim()])]


def total_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Size of the data of all tensors."""
    return sum(info.bytes for info in tensors.values())


def slabs(
    shape: Sequence[int], cuts: int, max_elements: int = AT_A_TIME, where: Where = ()
) -> Iterator[list[slice]]:
    """Divide a tensor, or a part of it, into blocks of a bounded size.

    Args:
        shape: shape of the tensor.
        cuts: see ``Weights.cuts``; blocks are larger if too few dimensions can be cut.
        max_elements: limit for the elements of a block.
        where: the part; see ``Where``.
    """
    slices = full(shape, where)
    sizes = [part.stop - part.start for part in slices]
    if not cuts or prod(sizes) <= max_elements:
        if 0 not in sizes:
            yield slices
        return
    (first, *rest), inner = slices, shape[1:]
    step = max(1, max_elements // prod(sizes[1:]))
    for start in range(first.start, first.stop, step):
        rows = slice(start, min(start + step, first.stop))
        for others in slabs(inner, cuts - 1, max_elements, rest) if step == 1 else [rest]:
            yield [rows, *others]


def parts(weights: Weights, name: str, elements: int | None = None) -> list[slice]:
    """Divide the rows of a tensor into ranges of about ``AT_ONCE`` elements.

    Args:
        weights: the weights that hold the tensor.
        name: name of the tensor.
        elements: elements in memory per whole tensor, if other data is read with it.
    """
    info = weights.tensors[name]
    limit = max(1, AT_ONCE * info.elements // max(1, elements or info.elements))
    blocks = slabs(info.shape or (1,), min(1, weights.cuts(name)), limit)
    return [rows for rows, *_ in blocks]


def total_parameters(tensors: Mapping[str, TensorInfo]) -> int:
    """Number of elements of all tensors."""
    return sum(info.elements for info in tensors.values())


def main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The float dtype that holds most of the parameters."""
    elements: dict[str, int] = {"F32": 0}  # the default if no tensor is a float
    for info in tensors.values():
        if info.dtype in FLOAT_BYTES:
            elements[info.dtype] = elements.get(info.dtype, 0) + info.elements
    return max(elements, key=lambda dtype: elements[dtype])
