"""Where the tensors lie in a ``pytorch_model.bin``: a zip archive that is not compressed.

``data.pkl`` in it says what is what, and is read by the part of torch that runs no code. The
numbers are in records of their own, one for each storage, so that a tensor is had without the
others. Files from before torch 1.6 are no archives; they are read as a whole for every tensor.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import IO, TYPE_CHECKING, Any, cast
from unittest.mock import patch

from growkit.base.errors import InputError, reason
from growkit.checkpoint.folder import Folder, read
from growkit.checkpoint.tensors import ELEMENT_BYTES, STORED_NAMES, TensorInfo, cut
from growkit.checkpoint.weight_file import Place, WeightFile, check_header, row_by_row

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

MOST_PICKLE = 1 << 21
"""Bytes of ``data.pkl``; fifteen thousand tensors take as many."""

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files from before torch 1.6 begin."""

NAMED = {"torch", "collections", "numpy", "_codecs", "builtins", "__builtin__", "copyreg"}
"""Packages of which torch takes something that a pickle of tensors names."""

MOST_AT_ONCE = 1 << 24
"""Bytes of the archive that are read at a time while it is opened: its list of records is one."""

_SAFETENSORS_NAMES = {name: dtype for dtype, name in STORED_NAMES.items()}


@dataclass(frozen=True)
class Kind:
    """What a file of torch is expected to hold.

    Attributes:
        name: in a few words.
        remedy: what to do where it holds something else.
    """

    name: str
    remedy: str


WEIGHTS = Kind("plain weights", "save the model as safetensors")
PART = Kind("a part of a distributed checkpoint", "copy the checkpoint again")


def open_torch_file(folder: Folder, name: str) -> WeightFile:
    """Read what a file says of its tensors.

    Raises:
        InputError: it does not hold plain weights.
    """
    path = folder.path / name
    with folder.open(name) as stream, _refusing(path, WEIGHTS):
        if _is_archive(stream, path):
            content, storages = _archived(stream, path, MOST_PICKLE)
            return WeightFile(folder, name, stream, storages.places(path, _plain(content, path)))
        return LegacyFile(folder, name, stream, _legacy(stream, path))


def open_saved(
    folder: Folder,
    name: str,
    tensors: Callable[[Any], dict[str, Tensor]],
    kind: Kind,
    most_pickle: int,
    also: str | None = None,
) -> tuple[Any, WeightFile]:
    """Read whatever ``torch.save`` wrote of plain values and tensors, without the numbers in these.

    Args:
        folder: where the file lies.
        name: of the file.
        tensors: takes what was saved, with tensors on the meta device, and gives those that are to
            be read, each with a name.
        kind: what it is expected to hold.
        most_pickle: bytes of everything that is no number of a tensor, at most.
        also: a package that may be named in the file; what stands for its classes is up to
            ``torch.serialization.safe_globals`` around this.

    Returns:
        What was saved, and the file from which these tensors are read by their names.

    Raises:
        InputError: it is truncated, holds code or is no archive.
    """
    path = folder.path / name
    with folder.open(name) as stream, _refusing(path, kind):
        if not _is_archive(stream, path):
            raise ValueError("it is no archive of torch")
        content, storages = _archived(stream, path, most_pickle, also)
        return content, WeightFile(folder, name, stream, storages.places(path, tensors(content)))


def open_part(folder: Folder, name: str, tensor: str, begin: int, length: int) -> WeightFile:
    """Read what a tensor says of itself that ``torch.save`` wrote into a part of a file.

    Args:
        folder: where the file lies.
        name: of the file.
        tensor: what it is called.
        begin: of the part, in bytes.
        length: of the part.

    Raises:
        InputError: there is no whole tensor.
    """
    path = folder.path / name
    with folder.open(name) as stream, _refusing(path, PART):
        part = cast("IO[bytes]", _Part(stream, begin, length))
        content, storages = _archived(part, path, MOST_PICKLE)
        (place,) = storages.places(path, _plain({tensor: content}, path)).values()
        return WeightFile(folder, name, stream, {tensor: replace(place, begin=begin + place.begin)})


def room(info: TensorInfo) -> Tensor:
    """What stands for a tensor in what is saved; it takes no memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(info.shape, dtype=getattr(torch, STORED_NAMES[info.dtype]))


@contextmanager
def _refusing(path: Path, kind: Kind) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats: nothing a user could change
            yield
    except InputError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        why = "it holds more than tensors" if type(error) is UnpicklingError else reason(error)
        raise InputError(
            f"{path} cannot be loaded as {kind.name} ({why}); it may be truncated or hold code, "
            f"{kind.remedy}"
        ) from None


def _is_archive(stream: IO[bytes], path: Path) -> bool:
    begin = read(stream, 40, path)
    if begin.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} only points to the weights; fetch them with 'git lfs pull'")
    stream.seek(0)
    return begin.startswith(b"PK\x03\x04")


class LegacyFile(WeightFile):
    """A file from before torch 1.6."""

    def cuts(self, name: str) -> int:
        """It is read as a whole."""
        return 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``WeightFile.read``."""
        with self._folder.open(self.path.name) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.check_unchanged(stream)
            try:
                whole = _load(stream)[name].contiguous()
            except Exception as error:
                raise InputError(
                    f"tensor {name} cannot be read from {self.path} ({reason(error)})"
                ) from None
        return cut(whole, where)


def _load(stream: IO[bytes]) -> dict[str, Tensor]:
    begin = stream.read(len(LEGACY))
    if begin != LEGACY:
        raise ValueError("it is no file of torch")
    stream.seek(0)
    import torch  # takes a second

    with torch._C.DisableTorchFunction():
        content: dict[str, Tensor] = torch.load(stream, map_location="cpu", weights_only=True)
    return content


def _legacy(stream: IO[bytes], path: Path) -> dict[str, Place]:
    tensors = _plain(_load(stream), path)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("tensors in it have no data")
    return {
        name: Place(0, _info(path, name, tensor), row_by_row(tuple(tensor.shape)))
        for name, tensor in tensors.items()
    }


def _archived(
    stream: IO[bytes], path: Path, most: int, also: str | None = None
) -> tuple[Any, _Storages]:
    """What an archive holds, without the numbers of its tensors, and where those are."""
    records = _records(stream)
    order = _record(stream, records, "byteorder", 16) if "byteorder" in records else b"little"
    if order.decode() != sys.byteorder:
        raise InputError(
            f"{path} is of a machine of the other byte order; save the model as safetensors"
        )
    storages = _Storages(records)
    content = _record(stream, records, "data.pkl", most)
    _check_names(content, {*NAMED, also})
    import torch  # takes a second
    from torch._weights_only_unpickler import Unpickler

    loader: Any = Unpickler(io.BytesIO(content), encoding="utf-8")
    # A class of its own would be a cycle, which keeps memory until garbage is looked for: growing a
    # state of 480 MB in parts took 400 MB more (measured).
    loader.persistent_load = lambda pid: storages.load(*pid)

    # Where there is no data, torch takes strides that it refuses where there is.
    forward = patch.object(torch._utils, "_rebuild_tensor", _forward(torch._utils._rebuild_tensor))
    with forward, torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
        return loader.load(), storages


def _check_names(pickled: bytes, known: Collection[str | None]) -> None:
    """Refuse what the part of torch that runs no code would, but before torch is there.

    Raises:
        UnpicklingError: something is named that has nothing to do with tensors.
    """
    for opcode, argument, _ in genops(pickled):
        if opcode.name == "GLOBAL" and str(argument).partition(".")[0].split(" ")[0] not in known:
            raise UnpicklingError(f"{argument} is no tensor")


def _forward(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(storage: Any, begin: Any, size: Any, strides: Any) -> Tensor:
        if min(strides, default=0) < 0:
            raise ValueError(f"a tensor runs backwards, with strides {strides}")
        return rebuild(storage, begin, size, strides)

    return checked


Records = Mapping[str, tuple[int, int]]
"""Offset and size of every record of an archive, in bytes, by its name."""


def _records(stream: IO[bytes]) -> Records:
    size = stream.seek(0, os.SEEK_END)
    records: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(_Bounded(stream)) as archive:
        for record in archive.infolist():
            name = record.filename.partition("/")[2]
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"record {record.filename!r} is compressed")
            if name.lower() in records:
                raise ValueError(f"record {record.filename!r} stands twice")
            stream.seek(record.header_offset)
            header = stream.read(30)
            begin = record.header_offset + len(header) + sum(_lengths(header))
            if begin + record.file_size > size:
                raise ValueError(f"record {record.filename!r} is not complete")
            records[name.lower()] = begin, record.file_size
    return records


def _lengths(header: bytes) -> tuple[int, int]:
    """Of the name and of what follows it, from the 30 bytes that stand before a record."""
    return int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")


def _record(stream: IO[bytes], records: Records, name: str, most: int) -> bytes:
    if name not in records:
        raise ValueError(f"it has no record {name}")
    begin, size = records[name]
    if size > most:
        raise ValueError(f"its record {name} has {size:,} bytes, more than {most:,}")
    stream.seek(begin)
    return stream.read(size)


class _Bounded(io.RawIOBase):
    """A file of which only parts are read: the list of records is no larger than real ones."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(MOST_AT_ONCE + 1 if size < 0 else min(size, MOST_AT_ONCE + 1))
        if len(data) > MOST_AT_ONCE:
            raise ValueError(f"its list of records has more than {MOST_AT_ONCE:,} bytes")
        return data


class _Part(io.RawIOBase):
    """A part of a file, as if it were one of its own."""

    def __init__(self, stream: IO[bytes], begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._length)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _Storages:
    """The storages of an archive, without their numbers."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._known: dict[str, UntypedStorage] = {}
        self._keys: dict[int, str] = {}

    def load(self, kind: str, storage_type: Any, key: str, location: str, count: int) -> Any:
        """The storage that a pickle refers to.

        Raises:
            ValueError: its record is missing, or is not as large as it says.
        """
        import torch

        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        size = int(count) * dtype.itemsize
        if self._records.get(f"data/{key}".lower(), (0, -1))[1] != size:
            raise ValueError(f"storage {key!r} does not have the {size:,} bytes it should have")
        if key not in self._known:
            self._known[key] = torch.UntypedStorage(size, device="meta")
            self._keys[self._known[key]._cdata] = key
        return torch.storage.TypedStorage(
            wrap_storage=self._known[key], dtype=dtype, _internal=True
        )

    def places(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        """Where tensors lie, by their names; see ``place``."""
        return {name: self.place(path, name, tensor) for name, tensor in tensors.items()}

    def place(self, path: Path, name: str, tensor: Tensor) -> Place:
        """Where a tensor lies.

        Raises:
            ValueError: it reaches beyond its storage, or repeats numbers.
        """
        info = _info(path, name, tensor)
        key = self._keys.get(tensor.untyped_storage()._cdata)
        if key is None:
            raise ValueError(f"tensor {name} has no data")
        element = ELEMENT_BYTES[info.dtype]
        begin, size = self._records[f"data/{key}".lower()]
        first = int(tensor.storage_offset()) * element
        place = Place(begin + first, info, tuple(tensor.stride()))
        if info.bytes > size or first + place.extent * element > size:
            raise ValueError(f"tensor {name} reaches beyond its storage, or repeats parts of it")
        return place


def _plain(content: Any, path: Path) -> dict[str, Tensor]:
    """A dictionary of dense tensors, and nothing else.

    Raises:
        InputError: it is something else.
    """
    import torch

    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_neg())
        for name, tensor in content.items()
    ):
        raise InputError(
            f"{path} does not hold a plain dictionary of dense tensors; save the model as "
            "safetensors"
        )
    return content


def _info(path: Path, name: str, tensor: Tensor) -> TensorInfo:
    dtype = str(tensor.dtype).removeprefix("torch.")
    info = TensorInfo(tuple(tensor.shape), _SAFETENSORS_NAMES.get(dtype, dtype))
    check_header(path, name, info.shape, info.dtype)
    return info
