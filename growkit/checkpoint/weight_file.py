"""A file of weights: where each tensor lies in it, and reading some of it.

Files are read, never mapped: one that is cut off while it is mapped ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

from growkit.base.errors import InputError, reason
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.inputs import state_of
from growkit.checkpoint.tensors import ELEMENT_BYTES, STORED_NAMES, TensorInfo, Weights, cut, full

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


class WeightFile(Weights):
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
        self.tensors = {name: place.info for name, place in places.items()}
        self._folder = folder
        self._stamp = state_of(os.fstat(stream.fileno()))

    @property
    def paths(self) -> list[Path]:
        """Of all files that are read."""
        return [self.path]

    def cuts(self, name: str) -> int:
        """Rows and columns, if they are in order in the file."""
        return 2 if self.places[name].in_order else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor, in the dtype in which it is stored.

        Of rows that are longer than what a file system reads at least, only some columns are read.

        Raises:
            InputError: the file is another one by now, or cannot be read.
        """
        import torch

        place = self.places[name]
        shape, element = place.info.shape, ELEMENT_BYTES[place.info.dtype]
        dtype: torch.dtype = getattr(torch, STORED_NAMES[place.info.dtype])
        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            if not place.in_order:
                data = self._bytes(name, place.begin, place.extent * element)
                return cut(data.view(dtype).as_strided(shape, place.strides).contiguous(), where)
            if not shape:
                return self._bytes(name, place.begin, element).view(dtype).view(())
            rows, *rest = full(shape, where)
            count, row = rows.stop - rows.start, prod(shape[1:]) * element
            begin = place.begin + rows.start * row
            if rest[:1] in ([], [slice(0, *shape[1:2])]) or row <= PAGE:
                data = self._bytes(name, begin, count * row)
                return cut(data.view(dtype).view(count, *shape[1:]), (None, *where[1:]))
            wide, column = rest[0].stop - rest[0].start, prod(shape[2:]) * element
            data = self._bytes(name, begin + rest[0].start * column, wide * column, count, row)
            return cut(data.view(dtype).view(count, wide, *shape[2:]), (None, None, *where[2:]))

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
