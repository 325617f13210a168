"""Files of weights, safetensors or torch's: the header is read first, numbers when asked for.

Files are read, never mapped: one that is cut off while it is mapped ends the process. So the header
of a safetensors file is read here, not by the library, which maps it or gives whole tensors
(https://github.com/huggingface/safetensors#format). Of an archive of torch, torch reads what it
holds, without the numbers, once names and sizes of its records are found to be sound.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple, cast

from growkit.base.errors import InputError, reason
from growkit.base.lazy import Tensor, torch
from growkit.base.parsing import parse_json
from growkit.base.tensors import STORED_NAMES, TensorInfo, Weights, cut, full
from growkit.checkpoint.folder import Folder, State, read, state_of

MOST_DIMENSIONS = 16
MOST_SIZE = 1 << 62
"""Elements of a tensor, at most, if no dimension were 0: more overflows in torch."""

LONGEST_NAME = 500

PAGE = 1 << 12
"""Bytes that a file system reads at least: of shorter rows all columns are read."""

MOST_HEADER = 1 << 25
"""Bytes of a safetensors header; a hundred thousand tensors take a third of it."""

MOST_PICKLE = 1 << 21
"""Bytes of ``data.pkl`` in an archive; fifteen thousand tensors take as many."""

MOST_AT_ONCE = 1 << 25
"""Bytes of an archive that are read at a time while it is opened: its list of records is one."""


class Place(NamedTuple):
    """Where a tensor is in its file.

    Attributes:
        begin: the offset of its first element, in bytes.
        info: its shape and dtype.
        strides: elements from one index to the next, for each dimension; None if row by row.
    """

    begin: int
    info: TensorInfo
    strides: tuple[int, ...] | None = None

    @property
    def extent(self) -> int:
        """Number of elements in the file from the first to the last, both included."""
        if not self.strides or not self.info.elements:
            return self.info.elements
        steps = zip(self.info.shape, self.strides, strict=True)
        return 1 + sum((count - 1) * stride for count, stride in steps)


def check_header(path: Path | str, name: str, info: TensorInfo) -> None:
    """Refuse names, shapes and dtypes that no model has.

    Raises:
        ValueError: names the tensor.
        InputError: names the dtype.
    """
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:LONGEST_NAME]!r} is no name of a tensor")
    most = prod(max(size, 1) for size in info.shape)
    if len(info.shape) > MOST_DIMENSIONS or most > MOST_SIZE:
        raise ValueError(f"tensor {name} has no possible shape")
    if info.dtype not in STORED_NAMES:
        raise InputError(
            f"tensor {name} in {path} has dtype {info.dtype}, which is none of "
            f"{', '.join(STORED_NAMES)}; dequantise the model, or save it in one of these"
        )


class WeightFile(Weights):
    """A file of weights whose header has been read.

    Args:
        folder: that has the file.
        name: its name there.
        state: of the file, in which its header was read.
        places: of all tensors.
    """

    def __init__(
        self, folder: Folder, name: str, state: State, places: Mapping[str, Place]
    ) -> None:
        self.path, self.paths = folder.path / name, [folder.path / name]
        self.places = places
        self.tensors = {name: place.info for name, place in places.items()}
        self._folder, self._state = folder, state

    def cuts(self, name: str) -> int:
        """Rows and columns, if the elements are in order."""
        return 2 if self.places[name].strides is None else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor, in the dtype in which it is stored.

        Of rows that are longer than what a file system reads at least, only some columns are read.

        Raises:
            InputError: the file is another one by now, or cannot be read.
        """
        begin, info, strides = self.places[name]
        with torch._C.DisableTorchFunction():  # strict float64 must not apply
            if strides is not None or not info.shape:
                data = self._bytes(name, begin, self.places[name].extent * info.element_bytes)
                whole = data.view(info.torch_dtype).as_strided(info.shape, strides or ())
                return cut(whole.contiguous(), where)
            (rows, *rest), inner = full(info.shape, where), info.shape[1:]
            count, row = rows.stop - rows.start, prod(inner) * info.element_bytes
            begin += rows.start * row
            if rest[:1] in ([], [slice(0, *inner[:1])]) or row <= PAGE:
                data = self._bytes(name, begin, count * row).view(info.torch_dtype)
                return cut(data.view(count, *inner), (None, *where[1:]))
            wide, column = rest[0].stop - rest[0].start, prod(inner[1:]) * info.element_bytes
            begin += rest[0].start * column
            data = self._bytes(name, begin, wide * column, count, row).view(info.torch_dtype)
            return cut(data.view(count, wide, *inner[1:]), (None, None, *where[2:]))

    def _bytes(self, name: str, begin: int, size: int, count: int = 1, step: int = 0) -> Tensor:
        """So many pieces of a size, which begin so many bytes apart; uint8, [size · count]."""
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
        if state_of(os.fstat(stream.fileno())) != self._state:
            raise InputError(
                f"{self.path} has changed while it was read; "
                "try again when nothing writes to it any more"
            )


@contextmanager
def explain_damage(failure: str, remedy: str) -> Iterator[None]:
    """Turn any error to which a damaged file leads into a sentence.

    Args:
        failure: what cannot be done.
        remedy: what to do about it.

    Raises:
        InputError: in the place of any other error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats: nothing a user could change
            yield
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        why = "it holds more than tensors" if isinstance(error, UnpicklingError) else reason(error)
        raise InputError(f"{failure} ({why}); {remedy}") from None


def open_weights(folder: Folder, name: str) -> WeightFile:
    """Read the headers of all tensors in a file, safetensors or ``*.bin``.

    Raises:
        InputError: it is damaged, holds something else, or only points to weights.
    """
    path = folder.path / name
    with folder.open(name) as stream:
        if read(stream, 40, path).startswith(b"version https://git-lfs"):
            raise InputError(f"{path} only points to the weights; fetch them with 'git lfs pull'")
        if name.endswith(".bin"):
            return open_saved(folder, name, WEIGHTS)[1](plain_tensors)
        stream.seek(0)
        remedy = "it may be truncated, copy it again"
        with explain_damage(f"{path} is not a whole safetensors file", remedy):
            state = state_of(os.fstat(stream.fileno()))
            return WeightFile(folder, name, state, _parse_header(stream, path))


# safetensors


def _parse_header(stream: IO[bytes], path: Path) -> dict[str, Place]:
    """Where every tensor is, by the header; nothing is taken that the library would refuse."""
    size = os.fstat(stream.fileno()).st_size - 8
    length = int.from_bytes(read(stream, 8, path), "little")
    if size < 0 or length > size:
        raise ValueError("its header is not complete")
    if length > MOST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {MOST_HEADER:,}")
    header = parse_json(read(stream, length, path))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is no mapping from text to text")
    places, edges = {}, [(0, 0), (size - length, size - length)]
    for name, entry in header.items():
        try:
            info = TensorInfo(sizes(entry["shape"]), str(entry["dtype"])[:LONGEST_NAME])
            begin, end = sizes(entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            shown = repr(name[:LONGEST_NAME])
            raise ValueError(f"{shown} has no dtype, shape and data_offsets") from None
        check_header(path, name, info)
        if end - begin != info.bytes:
            raise ValueError(f"tensor {name} does not have as many bytes as its shape")
        places[name] = Place(8 + length + begin, info)
        edges.append((begin, end))
    if any(end != begin for (_, end), (begin, _) in pairwise(sorted(edges))):
        raise ValueError("its tensors are not one after the other, up to the end of the file")
    return places


def sizes(found: Any) -> tuple[int, ...]:
    """Untrusted sizes or offsets.

    Raises:
        TypeError: they are no few whole numbers, each possible in a tensor.
    """
    if not isinstance(found, tuple | list) or len(found) > MOST_DIMENSIONS:
        raise TypeError("some whole numbers were expected")
    if not all(type(n) is int and 0 <= n <= MOST_SIZE for n in found):
        raise TypeError("whole numbers were expected")
    return tuple(found)


# Files of torch


@dataclass(frozen=True)
class TorchFile:
    """What a file of torch is expected to hold.

    Attributes:
        name: in a few words.
        remedy: what to do where it holds something else.
        most: bytes of everything that is no number of a tensor.
    """

    name: str
    remedy: str
    most: int = MOST_PICKLE


WEIGHTS = TorchFile("plain weights", "save the model as safetensors")


Select = Callable[[Callable[[Any], "Mapping[str, Tensor]"]], WeightFile]
"""The file from which some tensors of what was saved are read by their names. What chooses these,
and names them, is called with what was saved, in which all tensors are on the meta device."""


def open_saved(
    folder: Folder, name: str, kind: TorchFile, part: tuple[int, int] | None = None
) -> tuple[Any, Select]:
    """Read what ``torch.save`` wrote, plain values and tensors, without the numbers in these.

    Args:
        folder: that has the file.
        name: of the file.
        kind: what it is expected to hold.
        part: begin and length in the file, in bytes; None for all of it.

    Returns:
        What was saved, and what gives tensors of it; see ``Select``.

    Raises:
        InputError: it is truncated, holds code or is no archive.
    """
    path = folder.path / name
    failure = f"{path} cannot be loaded as {kind.name}"
    remedy = f"it may be truncated or hold code, {kind.remedy}"
    with folder.open(name) as stream, explain_damage(failure, remedy):
        state = state_of(os.fstat(stream.fileno()))
        begin, length = part or (0, state[3])
        archive = cast("IO[bytes]", _Archive(stream, begin, length))
        if archive.read(4) != b"PK\x03\x04":
            raise ValueError("it is no archive, as torch writes them since version 1.6")
        content = _content(*_records(archive, path, kind.most))

    def select(tensors: Callable[[Any], Mapping[str, Tensor]]) -> WeightFile:
        with explain_damage(failure, remedy):
            chosen = tensors(content).items()
            places = {each: _place(path, each, tensor, begin) for each, tensor in chosen}
        return WeightFile(folder, name, state, places)

    return content, select


def plain_tensors(content: Any) -> dict[str, Tensor]:
    """A dictionary of dense tensors, and nothing else.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_neg())
        for name, tensor in content.items()
    ):
        raise ValueError("it is no plain dictionary of dense tensors")
    return content


def placeholder(info: TensorInfo) -> Tensor:
    """What is saved in the place of a tensor; it takes no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(info.shape, dtype=info.torch_dtype)


class _Archive:
    """An archive in a part of a file; no more is read at once than real ones need."""

    def __init__(self, stream: IO[bytes], begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._length)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        if (count := left if size < 0 else min(size, left)) > MOST_AT_ONCE:
            raise ValueError(f"its list of records has more than {MOST_AT_ONCE:,} bytes")
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(count)
        self._at += len(data)
        return data


Records = Mapping[str, tuple[int, int]]
"""Where the data of every record of an archive begins, and its size, in bytes."""


def _records(archive: IO[bytes], path: Path, most: int) -> tuple[Records, bytes]:
    """The records of an archive, and the contents of ``data.pkl``."""
    found = dict[str, tuple[int, int]]()
    with zipfile.ZipFile(archive) as opened:
        for record in opened.infolist():
            name = record.filename.partition("/")[2]
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"record {record.filename!r} is compressed")
            if name in found:
                raise ValueError(f"record {record.filename!r} is there twice")
            archive.seek(record.header_offset)
            header = archive.read(30)
            lengths = header[26:28], header[28:30]  # of its name, and of what follows that
            begin = archive.tell() + sum(int.from_bytes(each, "little") for each in lengths)
            if begin + record.file_size > archive.seek(0, os.SEEK_END):
                raise ValueError(f"record {record.filename!r} is not complete")
            found[name] = begin, record.file_size

    def read_record(name: str, most: int) -> bytes:
        begin, size = found[name]
        if size > most:
            raise ValueError(f"its record {name} has {size:,} bytes, more than {most:,}")
        archive.seek(begin)
        return archive.read(size)

    if "byteorder" in found and read_record("byteorder", 16) != sys.byteorder.encode():
        raise InputError(
            f"{path} is of a machine of the other byte order; save the model as safetensors"
        )
    return found, read_record("data.pkl", most)


def _content(records: Records, pickled: bytes) -> Any:
    """What an archive holds, with every tensor on the meta device.

    torch.load does the same, but it computes where storages are, which is wrong in archives that
    another library has written.
    """
    from unittest.mock import patch

    from torch._weights_only_unpickler import Unpickler

    known: dict[str, Any] = {}
    rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor

    def forward(storage: Any, begin: Any, size: Any, strides: Any) -> Tensor:
        """Refuse what torch refuses, but not on the meta device."""
        if min(strides, default=0) < 0:
            raise ValueError(f"a tensor runs backwards, with strides {strides}")
        return rebuild(storage, begin, size, strides)

    def storage(saved: tuple[Any, ...]) -> Any:
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        begin, size = records[f"data/{key}"]
        if int(count) * dtype.itemsize != size:
            raise ValueError(f"storage {key!r} does not have as many bytes as its record, {size:,}")
        if key not in known:
            known[key] = torch.UntypedStorage(size, device="meta")
            known[key].place = begin, size
        return torch.storage.TypedStorage(wrap_storage=known[key], dtype=dtype, _internal=True)

    loader: Any = Unpickler(io.BytesIO(pickled), encoding="utf-8")
    loader.persistent_load = storage
    patched = patch.object(torch._utils, "_rebuild_tensor", forward)
    with patched, torch._C.DisableTorchFunction():  # strict float64 must not apply
        return loader.load()


def _place(path: Path, name: str, tensor: Tensor, archive: int) -> Place:
    """Where a tensor is in a file, in which an archive begins at this byte.

    Raises:
        ValueError: it reaches beyond its storage, or repeats numbers.
    """
    info = TensorInfo.of_torch(tensor.shape, tensor.dtype)
    check_header(path, name, info)
    begin, size = getattr(tensor.untyped_storage(), "place", (0, -1))
    first = int(tensor.storage_offset()) * info.element_bytes
    in_order = tensor.is_contiguous() or not info.elements
    place = Place(archive + begin + first, info, None if in_order else tensor.stride())
    if max(info.bytes, first + place.extent * info.element_bytes) > size:
        raise ValueError(f"tensor {name} reaches beyond its storage, or repeats parts of it")
    return place
