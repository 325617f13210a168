"""Where the tensors lie in a safetensors file: https://github.com/huggingface/safetensors#format.

The library gives whole tensors, or maps the file. So its header is read here, and nothing is taken
that the library would not take (a test holds the two together).
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeGuard

from growkit.base.errors import InputError, reason
from growkit.base.parsing import parse_json
from growkit.checkpoint.folder import Folder, read
from growkit.checkpoint.tensors import TensorInfo
from growkit.checkpoint.weight_file import (
    LONGEST_NAME,
    Place,
    WeightFile,
    check_header,
    row_by_row,
)

MOST_HEADER = 1 << 25
"""Bytes; a hundred thousand tensors take a third of it."""


def open_safetensors(folder: Folder, name: str) -> WeightFile:
    """Read the header of a file.

    Raises:
        InputError: it is no whole safetensors file.
    """
    with folder.open(name) as stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            places = places_in(stream, size, folder.path / name)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{folder.path / name} is not a whole safetensors file ({reason(error)}); it may "
                "be truncated, copy it again"
            ) from None
        return WeightFile(folder, name, stream, places)


def places_in(stream: IO[bytes], size: int, path: Path | str) -> dict[str, Place]:
    """Where every tensor lies, as the header says; all of it is checked.

    Args:
        stream: the file, at its begin.
        size: of the file, in bytes.
        path: what messages call it.

    Raises:
        ValueError: says what is wrong with the header.
        InputError: see ``check_header``; or the file only points to weights.
    """
    begin = read(stream, 40, path)
    if begin.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} only points to the weights; fetch them with 'git lfs pull'")
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > size - 8:
        raise ValueError("its header is not complete")
    if length > MOST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {MOST_HEADER:,}")
    stream.seek(8)
    header = parse_json(read(stream, length, path))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is no mapping from text to text")

    places: dict[str, Place] = {}
    parts: list[tuple[int, int]] = []
    for name, entry in header.items():
        shape, offsets, dtype = _entry(name, entry)
        check_header(path, name, shape, dtype)
        info = TensorInfo(shape, dtype)
        if offsets[1] - offsets[0] != info.bytes:
            raise ValueError(f"tensor {name} does not have as many bytes as its shape")
        places[name] = Place(8 + length + offsets[0], info, row_by_row(shape))
        parts.append(offsets)
    parts = [(0, 0), *sorted(parts), (size - 8 - length, size - 8 - length)]
    if any(end != begin for (_, end), (begin, _) in pairwise(parts)):
        raise ValueError("its tensors do not lie one after the other, up to the end of the file")
    return places


def _entry(name: str, entry: Any) -> tuple[tuple[int, ...], tuple[int, int], str]:
    """Shape, offsets and dtype of a tensor."""
    if isinstance(entry, dict):
        shape, offsets, dtype = (entry.get(key) for key in ("shape", "data_offsets", "dtype"))
        if _sizes(shape) and _sizes(offsets) and len(offsets) == 2 and isinstance(dtype, str):
            return tuple(shape), (offsets[0], offsets[1]), dtype
    raise ValueError(f"{name[:LONGEST_NAME]!r} has no dtype, shape and data_offsets")


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers, none of them negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
