"""Files of weights, safetensors or torch archives: first the header, then data on demand.

Files are read, never mapped: truncation of a mapped file kills the process. Therefore the header of
a safetensors file is read here and not by the library, which maps the file or returns whole tensors
(https://github.com/huggingface/safetensors#format). torch reads the contents of an archive, without
the data, after names and sizes of its records have been checked.
"""

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
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from growkit.base.errors import InputError, reason
from growkit.base.lazy import Tensor, torch
from growkit.base.parsing import parse_json
from growkit.base.tensors import STORED_NAMES, TensorInfo, Weights, cut, full
from growkit.base.torch_internals import stored_dtypes, unpickled
from growkit.model.checkpoint.folder import Folder, State, read, state_of

MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 62
"""Limit for the elements of a tensor, counting empty dimensions as 1: more overflow in torch."""

LONGEST_NAME = 500

PAGE = 1 << 12
"""Smallest read of a file system, in bytes: shorter rows are read with all their columns."""

MAX_HEADER = 1 << 25
"""Limit for a safetensors header, in bytes; a hundred thousand tensors take a third of it."""

MAX_PICKLE = 1 << 21
"""Limit for ``data.pkl`` in an archive, in bytes; fifteen thousand tensors take as many."""

MAX_AT_ONCE = 1 << 25
"""Limit for one read while an archive is opened, in bytes: the list of records is one read."""


class Place(NamedTuple):
    """The location of a tensor in its file.

    Attributes:
        begin: offset of the first element, in bytes.
        info: shape and dtype.
        strides: stride of each dimension, in elements; None for row-major order.
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
        ValueError: the name or the shape is impossible.
        InputError: the dtype is unknown.
    """
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(f"{name[:LONGEST_NAME]!r} is not the name of a tensor")
    elements = prod(max(size, 1) for size in info.shape)
    if len(info.shape) > MAX_DIMENSIONS or elements > MAX_SIZE:
        raise ValueError(f"tensor {name} has an impossible shape")
    if info.dtype not in STORED_NAMES:
        raise InputError(
            f"tensor {name} in {path} has dtype {info.dtype}, which is none of "
            f"{', '.join(STORED_NAMES)}; save it in one of these"
        )


class StoredWeights(Weights):
    """The tensors of one or several files.

    Attributes:
        path: path of the file, or of the one that lists the others.
        paths: paths of all files that are read.
        note: a sentence on numbers that are not stored as they are read; empty if all are.
    """

    path: Path
    paths: list[Path]
    note: str = ""

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return str(self.path)


class WeightFile(StoredWeights):
    """A file of weights whose header has been read.

    Args:
        folder: folder of the file.
        name: name of the file in the folder.
        state: state of the file when its header was read.
        places: location of every tensor, by name.
        metadata: texts in the header of safetensors, by name.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        state: State,
        places: Mapping[str, Place],
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path, self.paths = folder.path / name, [folder.path / name]
        self.places, self.metadata = places, metadata
        self.tensors = {name: place.info for name, place in places.items()}
        self._folder, self._state = folder, state

    def cuts(self, name: str) -> int:
        """Rows and columns, if the tensor is in row-major order."""
        return 2 if self.places[name].strides is None else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a part of a tensor, in its stored dtype.

        Rows longer than ``PAGE`` are read without the unrequested columns.

        Raises:
            InputError: the file has changed since, or cannot be read.
        """
        start, info, strides = self.places[name]
        with stored_dtypes():  # strict float64 must not apply
            if strides is not None or not info.shape:
                data = self._bytes(name, start, self.places[name].extent * info.element_bytes)
                full_tensor = data.view(info.torch_dtype).as_strided(info.shape, strides or ())
                return cut(full_tensor.contiguous(), where)
            (rows, *rest), inner = full(info.shape, where), info.shape[1:]
            count, row = rows.stop - rows.start, prod(inner) * info.element_bytes
            start += rows.start * row
            if rest[:1] in ([], [slice(0, *inner[:1])]) or row <= PAGE:
                data = self._bytes(name, start, count * row).view(info.torch_dtype)
                return cut(data.view(count, *inner), (None, *where[1:]))
            wide, column = rest[0].stop - rest[0].start, prod(inner[1:]) * info.element_bytes
            start += rest[0].start * column
            data = self._bytes(name, start, wide * column, count, row).view(info.torch_dtype)
            return cut(data.view(count, wide, *inner[1:]), (None, None, *where[2:]))

    def _bytes(self, name: str, start: int, size: int, count: int = 1, step: int = 0) -> Tensor:
        """Read pieces of ``size`` bytes at intervals of ``step`` bytes; uint8, [size · count]."""
        data = torch.empty(size * count, dtype=torch.uint8)
        buffer = data.numpy().data
        with self._folder.open(self.path.name) as stream:
            self.check_unchanged(stream)
            try:
                missing = 0
                for number in range(count):
                    piece = buffer[number * size : (number + 1) * size]
                    # Unbuffered, since a buffer would read more.
                    stream.raw.seek(start + number * step, os.SEEK_SET)
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
        """Refuse a file that changed after its header was read.

        Raises:
            InputError: the file has been replaced or written to.
        """
        if state_of(os.fstat(stream.fileno())) != self._state:
            raise InputError(
                f"{self.path} has changed while it was read; try again when nothing writes to it"
            )


@contextmanager
def explain_damage(failure: str, remedy: str) -> Iterator[None]:
    """Turn every error that a damaged file causes into an ``InputError``.

    Args:
        failure: the beginning of the message.
        remedy: the end of the message.

    Raises:
        InputError: instead of any other error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats, which users cannot change
            yield
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        why = "it holds more than tensors" if isinstance(error, UnpicklingError) else reason(error)
        raise InputError(f"{failure} ({why}); {remedy}") from None


def open_weights(folder: Folder, name: str) -> WeightFile:
    """Open a file of weights, safetensors or ``*.bin``, and read its header.

    Raises:
        InputError: the file is damaged, not a file of weights, or a pointer of Git LFS.
    """
    path = folder.path / name
    with folder.open(name) as stream:
        if name.endswith(".bin"):
            return open_saved(folder, name, WEIGHTS)[1](plain_tensors)
        remedy = "it may be truncated, copy it again"
        with explain_damage(f"{path} is not a whole safetensors file", remedy):
            state = state_of(os.fstat(stream.fileno()))
            return WeightFile(folder, name, state, *_parse_header(stream, path))


# safetensors


def _parse_header(stream: IO[bytes], path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """Parse the header into the location of every tensor, and texts; as strict as the library."""
    size = os.fstat(stream.fileno()).st_size - 8
    length = int.from_bytes(read(stream, 8, path), "little")
    if size < 0 or length > size:
        raise ValueError("its header is not complete")
    if length > MAX_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
    header = parse_json(read(stream, length, path))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not a mapping from text to text")
    places, edges = {}, [(0, 0), (size - length, size - length)]
    for name, entry in header.items():
        try:
            info = TensorInfo(sizes(entry["shape"]), str(entry["dtype"])[:LONGEST_NAME])
            start, end = sizes(entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            shown = repr(name[:LONGEST_NAME])
            raise ValueError(f"{shown} has no dtype, shape and data_offsets") from None
        check_header(path, name, info)
        if end - start != info.bytes:
            raise ValueError(f"tensor {name} has another number of bytes than its shape needs")
        places[name] = Place(8 + length + start, info)
        edges.append((start, end))
    if any(end != start for (_, end), (start, _) in pairwise(sorted(edges))):
        raise ValueError("its tensors do not fill the file without gaps or overlaps")
    return places, metadata


def sizes(value: Any) -> tuple[int, ...]:
    """Check untrusted sizes or offsets.

    Raises:
        TypeError: they are too many, or not whole numbers that a tensor can have.
    """
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise TypeError("some whole numbers were expected")
    if not all(type(n) is int and 0 <= n <= MAX_SIZE for n in value):
        raise TypeError("whole numbers were expected")
    return tuple(value)


# Archives of torch


@dataclass(frozen=True)
class TorchFile:
    """The expected contents of a torch archive.

    Attributes:
        name: the contents, in a few words.
        remedy: the end of the message if it holds something else.
        limit: limit for everything but the data of tensors, in bytes.
    """

    name: str
    remedy: str
    limit: int = MAX_PICKLE


WEIGHTS = TorchFile("plain weights", "save the model as safetensors")


Select = Callable[[Callable[[Any], "Mapping[str, Tensor]"]], WeightFile]
"""Opens tensors of an archive. Its argument is a function that selects and names the tensors in the
archive's contents, where all tensors are on the meta device."""


def open_saved(
    folder: Folder, name: str, kind: TorchFile, part: tuple[int, int] | None = None
) -> tuple[Any, Select]:
    """Read plain values and tensors that ``torch.save`` wrote, without the data of tensors.

    Args:
        folder: folder of the file.
        name: name of the file.
        kind: the expected contents.
        part: begin and length of the archive in the file, in bytes; None for the whole file.

    Returns:
        The contents, and a function that opens tensors of it; see ``Select``.

    Raises:
        InputError: the file is truncated, holds code or is not an archive.
    """
    path = folder.path / name
    failure = f"{path} cannot be loaded as {kind.name}"
    remedy = f"it may be truncated or hold code, {kind.remedy}"
    with folder.open(name) as stream, explain_damage(failure, remedy):
        state = state_of(os.fstat(stream.fileno()))
        start, length = part or (0, state[3])
        archive = cast("IO[bytes]", _Archive(stream, start, length))
        if archive.read(4) != b"PK\x03\x04":
            raise ValueError("it is not an archive, which torch writes since version 1.6")
        content = _content(*_records(archive, path, kind.limit))

    def select(tensors: Callable[[Any], Mapping[str, Tensor]]) -> WeightFile:
        with explain_damage(failure, remedy):
            chosen = tensors(content).items()
            places = {key: _place(path, key, tensor, start) for key, tensor in chosen}
        return WeightFile(folder, name, state, places)

    return content, select


def plain_tensors(content: Any) -> dict[str, Tensor]:
    """Check that the contents of an archive are a dictionary of dense tensors.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_neg())
        for name, tensor in content.items()
    ):
        parts = content.items() if isinstance(content, dict) else ()
        inside = next((str(name) for name, part in parts if _has_tensors(part)), None)
        where = f"; that under {inside[:100]!r} may be, save it alone" if inside else ""
        raise ValueError(f"it is not a plain dictionary of dense tensors{where}")
    return content


def _has_tensors(content: Any) -> bool:
    return isinstance(content, dict) and any(
        isinstance(tensor, torch.Tensor) for tensor in content.values()
    )


class _Archive:
    """An archive in a part of a file; limits each read to what real archives need."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, start, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._length)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        if (count := left if size < 0 else min(size, left)) > MAX_AT_ONCE:
            raise ValueError(f"its list of records has more than {MAX_AT_ONCE:,} bytes")
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(count)
        self._at += len(data)
        return data


Records = Mapping[str, tuple[int, int]]
"""Offset and size of the data of every record in an archive, in bytes."""


def _records(archive: IO[bytes], path: Path, limit: int) -> tuple[Records, bytes]:
    """Read the records of an archive, and the contents of ``data.pkl``."""
    records = dict[str, tuple[int, int]]()
    with zipfile.ZipFile(archive) as opened:
        for record in opened.infolist():
            name = record.filename.partition("/")[2]
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"record {record.filename!r} is compressed")
            if name in records:
                raise ValueError(f"record {record.filename!r} is there twice")
            archive.seek(record.header_offset)
            header = archive.read(30)
            lengths = header[26:28], header[28:30]  # of the name, and of the extra field
            start = archive.tell() + sum(int.from_bytes(length, "little") for length in lengths)
            if start + record.file_size > archive.seek(0, os.SEEK_END):
                raise ValueError(f"record {record.filename!r} is not complete")
            records[name] = start, record.file_size

    def read_record(name: str, limit: int) -> bytes:
        start, size = records[name]
        if size > limit:
            raise ValueError(f"its record {name} has {size:,} bytes, more than {limit:,}")
        archive.seek(start)
        return archive.read(size)

    if "byteorder" in records and read_record("byteorder", 16) != sys.byteorder.encode():
        raise InputError(
            f"{path} has the byte order of another machine; save the model as safetensors"
        )
    return records, read_record("data.pkl", limit)


def _content(records: Records, pickled: bytes) -> Any:
    """Unpickle the contents of an archive, with every tensor on the meta device.

    torch.load does the same, but it computes the offsets of storages, which is wrong in archives of
    other libraries.
    """

    def check(storage: Any, offset: Any, size: Any, strides: Any) -> None:
        """Refuse negative sizes and strides, as torch does on other devices."""
        if min((*size, *strides), default=0) < 0:
            raise ValueError(f"a tensor runs backwards, with sizes {size} and strides {strides}")

    def storage(saved: tuple[Any, ...]) -> Any:
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        start, size = records[f"data/{key}"]
        if int(count) * dtype.itemsize != size:
            raise ValueError(f"storage {key!r} has another size than its record, {size:,} bytes")
        untyped: Any = torch.UntypedStorage(size, device="meta")
        untyped.place = start, size
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    return unpickled(pickled, storage, check)


def _place(path: Path, name: str, tensor: Tensor, archive: int) -> Place:
    """Locate a tensor in a file in which its archive begins at the byte ``archive``.

    Raises:
        ValueError: the tensor reaches beyond its storage, repeats elements of it, or has none of
            its own, such as a quantised one.
    """
    info = TensorInfo.of_torch(tensor.shape, tensor.dtype)
    check_header(path, name, info)
    record = getattr(tensor.untyped_storage(), "place", None)
    if record is None:
        kind = type(tensor).__name__
        raise ValueError(f"tensor {name} of class {kind} has no numbers of its own")
    start, size = record
    first = int(tensor.storage_offset()) * info.element_bytes
    in_order = tensor.is_contiguous() or not info.elements
    place = Place(archive + start + first, info, None if in_order else tensor.stride())
    if max(info.bytes, first + place.extent * info.element_bytes) > size:
        raise ValueError(f"tensor {name} reaches beyond its storage, or repeats parts of it")
    return place
