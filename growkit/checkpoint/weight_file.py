"""A file of weights: where each tensor lies in it, and reading some of it.

Files are read, never mapped: one that is cut off while it is mapped ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from growkit.base.errors import InputError, reason
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.inputs import state_of
from growkit.checkpoint.tensors import ELEMENT_BYTES, STORED_NAMES, TensorInfo, cut

if TYPE_CHECKING:
    from torch import Tensor

MOST_DIMENSIONS = 16
MOST_SIZE = 1 << 62
"""Of what a tensor would hold if no dimension were 0: more overflows in torch."""

LONGEST_NAME = 500

PAGE = 1 << 12
"""Bytes that a file system reads at least: of shorter rows all columns are read."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its file.

    Attributes:
        begin: the offset of its first element, in bytes.
        info: its shape and dtype.
        strides: elements from one index to the next, for each dimension.
    """

    begin: int
    info: TensorInfo
    strides: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether the elements lie one after the other, row by row."""
        return self.strides == row_by_row(self.info.shape) or not self.info.elements

    @property
    def extent(self) -> int:
        """Number of elements in the file from the first to the last, both included."""
        if not self.info.elements:
            return 0
        steps = zip(self.info.shape, self.strides, strict=True)
        return 1 + sum((count - 1) * stride for count, stride in steps)


def row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in order."""
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def check_header(path: Path | str, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse names, shapes and dtypes that no model has.

    Raises:
        ValueError: says which.
        InputError: says which dtype.
    """
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:LONGEST_NAME]!r} is no name of a tensor")
    if len(shape) > MOST_DIMENSIONS or prod(max(size, 1) for size in shape) > MOST_SIZE:
        raise ValueError(f"tensor {name} has no possible shape")
    if dtype not in ELEMENT_BYTES:
        raise InputError(
            f"tensor {name} in {path} has dtype {dtype}, which is none of "
            f"{', '.join(ELEMENT_BYTES)}; dequantise the model, or save it in one of these"
        )


class Bytes(Protocol):
    """Gives pieces of a file."""

    def __call__(self, name: str, begin: int, size: int, count: int = 1, step: int = 0) -> Tensor:
        """So many pieces of a size, one after the other, which begin so many bytes apart.

        ``name`` is that of the tensor, for messages. The result is uint8, [size · count].
        """
        ...


def read_place(
    pieces: Bytes, name: str, place: Place, rows: slice | None, columns: slice | None
) -> Tensor:
    """A tensor in its storage dtype, or some rows of it, or of these some columns.

    Args:
        pieces: of its file.
        name: of the tensor.
        place: where it lies.
        rows: consecutive ones; None for all.
        columns: of these rows; None for all.
    """
    import torch

    element = ELEMENT_BYTES[place.info.dtype]
    dtype: torch.dtype = getattr(torch, STORED_NAMES[place.info.dtype])
    if not place.in_order:
        data = pieces(name, place.begin, place.extent * element)
        whole = data.view(dtype).as_strided(place.info.shape, place.strides).contiguous()
        return cut(whole, rows, columns)
    shape, begin = place.info.shape, 0
    if rows is not None:
        begin, end, _ = rows.indices(shape[0])
        shape = (max(end - begin, 0), *shape[1:])
    row = prod(place.info.shape[1:]) * element
    first = place.begin + begin * row
    if columns is None or row <= PAGE:
        data = pieces(name, first, prod(shape) * element)
        return cut(data.view(dtype).view(shape), None, columns)
    left, right, _ = columns.indices(shape[1])
    shape = (shape[0], max(right - left, 0), *shape[2:])
    column = prod(shape[2:]) * element
    data = pieces(name, first + left * column, shape[1] * column, shape[0], row)
    return data.view(dtype).view(shape)


class WeightFile:
    """An open file of weights, whose header has been read.

    Args:
        folder: where it lies.
        name: its name there.
        stream: the open file.
        places: of all tensors.
    """

    def __init__(
        self, folder: Folder, name: str, stream: IO[bytes], places: Mapping[str, Place]
    ) -> None:
        self.path = folder.path / name
        self.places = places
        self._folder = folder
        self._stamp = state_of(os.fstat(stream.fileno()))

    @property
    def paths(self) -> list[Path]:
        """Of all files that are read."""
        return [self.path]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """What the header says of every tensor."""
        return {name: place.info for name, place in self.places.items()}

    def by_rows(self, name: str) -> bool:
        """Whether some rows of a tensor are had without the others."""
        return self.places[name].in_order

    def read(self, name: str, rows: slice | None, columns: slice | None = None) -> Tensor:
        """A tensor in its storage dtype, or some consecutive rows of it, or of these columns.

        Of rows that are longer than what a file system reads at least, only these columns are read.

        Raises:
            InputError: the file is another one by now, or cannot be read.
        """
        import torch

        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            return read_place(self._bytes, name, self.places[name], rows, columns)

    def _bytes(self, name: str, begin: int, size: int, count: int = 1, step: int = 0) -> Tensor:
        """So many pieces of a size, one after the other, which begin so many bytes apart."""
        import torch

        data = torch.empty(size * count, dtype=torch.uint8)
        whole = data.numpy().data
        with self._folder.open(self.path.name) as stream:
            self.check_unchanged(stream)
            try:
                missing = 0
                for number in range(count):
                    piece = whole[number * size : (number + 1) * size]
                    # Without a buffer, which would read more.
                    stream.raw.seek(begin + number * step, os.SEEK_SET)
                    while piece and (got := stream.raw.readinto(piece)):
                        piece = piece[got:]
                    missing += len(piece)
            except OSError as error:
                raise InputError(
                    f"tensor {name} cannot be read from {self.path} ({reason(error)})"
                ) from None
        if missing:
            raise InputError(
                f"tensor {name} cannot be read from {self.path}, which has been cut off; "
                "copy it again"
            )
        return data

    def check_unchanged(self, stream: IO[bytes]) -> None:
        """Refuse a file that is not the one whose header was read.

        Raises:
            InputError: it has been replaced or written to since.
        """
        if state_of(os.fstat(stream.fileno())) != self._stamp:
            raise InputError(
                f"{self.path} has changed while it was read; "
                "try again when nothing writes to it any more"
            )
