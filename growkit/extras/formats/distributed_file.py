"""Folders of torch.distributed.checkpoint, read by slices and written as a stream.

A tensor is stored in any number of parts, each a torch archive. The list of entries is an untrusted
pickle. Reading it instantiates no class of torch: the classes that such a list needs become
placeholders that only keep their arguments, and every other name is refused. Every shape, part and
position is checked, and every archive is compared with the list.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import ANYWHERE, STORED_NAMES, TensorInfo, full
from growkit.base.torch_internals import storage_info, stored_dtypes
from growkit.extras.formats import torch_archive
from growkit.model.checkpoint import weight_file
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.weight_file import (
    StoredWeights,
    TorchFile,
    WeightFile,
    open_saved,
    plain_tensors,
    sizes,
)
from growkit.model.checkpoint.writing import Shard, divide

MAX_CUT = 6
"""Limit for the number of dimensions in which a tensor is cut into parts."""

LIST = ".metadata"
"""The list of entries."""

REMEDY = "copy the checkpoint again, or save it again with torch.distributed.checkpoint"
VALUES = "__0_values.distcp"
"""File of plain values and small tensors."""

PART = TorchFile("a part of a distributed checkpoint", "copy the checkpoint again")
PATHS = {"Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}

CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {  # the plans that Megatron-Core keeps in its lists
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "complex32", "complex64", "complex128", *STORED_NAMES.values()},
    "collections": {"OrderedDict"},
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}
"""Names that a list of entries may contain, by module."""

OPCODES = """
    PROTO FRAME STOP MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET NONE NEWTRUE
    NEWFALSE BINFLOAT BININT BININT1 BININT2 LONG1 LONG4 SHORT_BINUNICODE BINUNICODE
    BINUNICODE8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT
    SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
"""
"""Operations of pickle, from protocol 2 on, that such a list needs."""

Sizes = tuple[int, ...]


class Part(NamedTuple):
    """A part of a tensor, or a value.

    Attributes:
        offsets: offset in every dimension.
        sizes: size in every dimension.
        file: file that holds it, relative to the folder.
        offset: offset in the file, in bytes.
        length: size in the file, in bytes.
    """

    offsets: Sizes
    sizes: Sizes
    file: str
    offset: int
    length: int


class Listed(NamedTuple):
    """An entry of the list.

    Attributes:
        path: names of the states that contain it, and its own name.
        shape: shape of a tensor; None for a value.
        dtype: torch name of a tensor's dtype; None for a value.
        parts: all parts of a tensor; a value has one.
    """

    path: tuple[str, ...]
    shape: Sizes | None
    dtype: str | None
    parts: tuple[Part, ...]


class DistributedFile(StoredWeights):
    """Some tensors of a folder.

    Args:
        folder: a folder with a list of entries.
        entries: entries of the tensors, by the names under which they are read.

    Raises:
        InputError: a tensor has an impossible name, shape or dtype.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, Listed]) -> None:
        self._folder, self._entries, self.path = folder, entries, folder.path / LIST
        files = {part.file for entry in entries.values() for part in entry.parts}
        self.paths = [self.path, *(folder.path / name for name in sorted(files))]
        self.tensors = {
            name: TensorInfo.of_torch(entry.shape or (), entry.dtype)
            for name, entry in entries.items()
        }
        for name, info in self.tensors.items():
            with explain_entry(folder, name):
                weight_file.check_header(self.path, name, info)
        self._opened: dict[tuple[str, int], WeightFile] = {}

    def cuts(self, name: str) -> int:
        """All dimensions."""
        return ANYWHERE

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``WeightFile.read``."""
        info, parts = self.tensors[name], []
        asked = full(info.shape, where)
        for part in self._entries[name].parts:
            inside = [
                slice(max(span.start, offset), min(span.stop, offset + size))
                for span, offset, size in zip(asked, part.offsets, part.sizes, strict=True)
            ]
            if all(span.start < span.stop for span in inside):
                parts.append((part, inside))
        if len(parts) == 1 and parts[0][0].sizes == info.shape:
            return self._open(name, parts[0][0]).read(name, *where)
        with stored_dtypes():  # strict float64 must not apply
            tensor = torch.empty([i.stop - i.start for i in asked], dtype=info.torch_dtype)
            for part, inside in parts:
                there = tuple(_shift(i, span.start) for i, span in zip(inside, asked, strict=True))
                tensor[there] = self._open(name, part).read(
                    name, *map(_shift, inside, part.offsets)
                )
        return tensor

    def _open(self, name: str, part: Part) -> WeightFile:
        """Open the archive of a part, whose header is read once.

        Raises:
            InputError: the archive does not hold the tensor that the list has there.
        """
        key = part.file, part.offset
        if key not in self._opened:
            _, select = open_saved(self._folder, part.file, PART, (part.offset, part.length))
            self._opened[key] = select(lambda saved: plain_tensors({name: saved}))
        file, expected = self._opened[key], TensorInfo(part.sizes, self.tensors[name].dtype)
        actual = file.tensors.get(name)
        if actual != expected:
            shown = f"{actual.dtype} {list(actual.shape)}" if actual else "another tensor"
            raise InputError(
                f"{file.path} holds {shown} where {self.path} lists {expected.dtype} "
                f"{list(expected.shape)} of {name}; they belong to two checkpoints, {REMEDY}"
            )
        return file


def _shift(where: slice, by: int) -> slice:
    return slice(where.start - by, where.stop - by)


# The list of entries


def read_list(folder: Folder) -> dict[str, Listed]:
    """Read the entries of a folder, by name, and check that each is complete.

    Raises:
        InputError: the list is damaged, or a part of an entry is missing.
    """
    content = folder.bytes(LIST)
    stored: dict[tuple[str, Sizes], tuple[str, int, int]] = {}
    with explain_entry(folder, LIST):
        # Python's own implementation has no table that a number in the file makes large.
        listed = _fields(_Unpickler(io.BytesIO(content)).load(), "Metadata")
        entries, paths = _typed(listed["state_dict_metadata"], dict), listed.get("planner_data")
        for index, place in _typed(listed["storage_data"], dict).items():
            which, at = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
            if at.get("transform_descriptors"):
                raise ValueError("its parts are compressed or transformed")
            key = _typed(which["fqn"], str), sizes(which.get("offset") or ())
            start, length = sizes((at["offset"], at["length"]))
            stored[key] = _typed(at["relative_path"], str), start, length
    read, lengths = {}, dict[str, int]()
    for name, of in entries.items():
        with explain_entry(folder, str(name)):
            read[_typed(name, str)] = _parse_entry(name, of, stored, paths)
            for part in read[name].parts:
                if part.file not in lengths:
                    lengths[part.file] = folder.require(part.file).stat().st_size
                if part.offset + part.length > lengths[part.file]:
                    raise ValueError(f"{part.file} has been cut off")
    return read


def explain_entry(folder: Folder, what: str) -> AbstractContextManager[None]:
    """Turn every error that damaged files cause into an ``InputError``."""
    return weight_file.explain_damage(f"{what} cannot be read from {folder}", REMEDY)


class _Placeholder:
    """Stands in for a class of torch: keeps the state of an object in the list."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Entries(dict[Any, Any]):
    """A dictionary whose keys are text or placeholders; hashing nested tuples may take for ever."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | _Placeholder):
            raise TypeError("an entry has no name")
        super().__setitem__(key, value)


class _Opcodes(dict[int, Any]):
    """The allowed opcodes; none of them makes a set, or an array of a size that is only claimed."""

    def __missing__(self, opcode: int) -> Any:
        raise ValueError(f"such a list does not need opcode {opcode}")


class _Unpickler(pickle._Unpickler):
    """Reads a list of entries, with placeholders for the classes of torch."""

    dispatch = _Opcodes(
        {
            code: pickle._Unpickler.dispatch[code]
            for code in (getattr(pickle, name)[0] for name in OPCODES.split())
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise ValueError(f"such a list does not need {module}.{name}")
        if module == "torch":
            return tuple if name == "Size" else name
        return _Entries if name == "OrderedDict" else type(name, (_Placeholder,), {})

    def _empty(self) -> None:
        cast(Any, self).append(_Entries())

    dispatch[pickle.EMPTY_DICT[0]] = _empty


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a placeholder, whose class must have this name."""
    fields = getattr(value, "state", None)
    if type(value).__name__ != kind or not isinstance(fields, dict | None):
        raise TypeError(f"{kind} was expected in the list of entries")
    return fields or {}


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or value == "":
        raise TypeError("an entry has no name" if kind is str else "it is not a list of entries")
    return value


def _parse_entry(
    name: str, of: Any, stored: Mapping[tuple[str, Sizes], tuple[str, int, int]], paths: Any
) -> Listed:
    path = (paths.get(name) if isinstance(paths, dict) else None) or (name,)
    if not isinstance(path, tuple) or not all(isinstance(part, str | int) for part in path):
        raise TypeError("a state that contains it has no name")
    boxes: list[tuple[Sizes, Sizes]] = [((), ())]
    shape = dtype = None
    if type(of).__name__ != "BytesStorageMetadata":
        fields = _fields(of, "TensorStorageMetadata")
        shape, properties = sizes(fields["size"]), fields["properties"]
        state = getattr(properties, "state", None)
        if type(properties).__name__ != "TensorProperties" or not isinstance(state, tuple):
            raise TypeError("its properties are not those of a tensor")
        dtype = _typed(state[0], str)
        chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
        boxes = [(sizes(chunk["offsets"]), sizes(chunk["sizes"])) for chunk in chunks]
        _check_whole(shape, boxes)
    if any((name, offsets) not in stored for offsets, _ in boxes):
        raise ValueError("a part of it is missing")
    parts = tuple(Part(offsets, extent, *stored[name, offsets]) for offsets, extent in boxes)
    return Listed(tuple(map(str, path)), shape, dtype, parts)


def _check_whole(shape: Sizes, parts: Sequence[tuple[Sizes, Sizes]]) -> None:
    """Check that every element of a tensor is in exactly one part.

    The corners of a box, with alternating signs, determine the set of its elements. So the signed
    corners of all parts must add up to those of the tensor. The time is linear in the parts.

    Raises:
        ValueError: the parts overlap, leave gaps or do not fit.
    """
    boxes = []
    for offsets, extent in parts:
        if not len(offsets) == len(extent) == len(shape):
            raise ValueError("its parts have another number of dimensions")
        box = [(offset, offset + size) for offset, size in zip(offsets, extent, strict=True)]
        if any(end > size for (_, end), size in zip(box, shape, strict=True)):
            raise ValueError("its parts reach beyond it")
        boxes.append(box)
    if 0 in shape:
        return
    full_box = [(0, size) for size in shape]
    cut = [d for d, edges in enumerate(full_box) if any(box[d] != edges for box in boxes)]
    if len(cut) > MAX_CUT:
        raise ValueError(f"it is cut in more than {MAX_CUT} dimensions")
    left: defaultdict[Sizes, int] = defaultdict(int)
    for sign, box in ((-1, full_box), *((1, box) for box in boxes)):
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(box[d][end] for d, end in zip(cut, ends, strict=True))
            left[corner] += sign * (-1) ** sum(ends)
    if any(left.values()):
        raise ValueError("its parts overlap or leave gaps")


# Writing


def distributed_shards(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[Shard]:
    """Plan the output files, with at most ``shard_bytes`` of tensors each; see ``shards_of``.

    Every tensor is an archive as ``torch.save`` writes it. Shape and dtype determine the bytes
    around its data.
    """
    planned = []
    for number, shard in enumerate(divide(tensors, shard_bytes)):
        frame, offsets, end = dict[int, bytes](), dict[str, int](), 0
        for name, info in shard.items():
            frame[end], after = _frame_of(info)
            offsets[name] = end + len(frame[end])
            end = offsets[name] + info.bytes
            frame[end] = after
            end += len(after)
        planned.append(Shard(f"__0_{number}.distcp", shard, frame, offsets))
    return planned


def write_list(
    shards: Sequence[Shard],
    folder: Path,
    names: Mapping[str, str],
    values: Mapping[str, Any] = MappingProxyType({}),
    path: Callable[[str], tuple[str | int, ...]] = lambda name: (name,),
) -> None:
    """Write the list of entries, and the entries that are in no shard.

    Args:
        shards: all files of tensors.
        folder: the folder of these files.
        names: the tensor's name in the shards, by the name under which it is loaded.
        values: all other entries (plain values or small tensors), by name.
        path: finds the path of an entry in nested states, by its name.
    """
    stored = _entries(shards)
    entries = {name: stored[own] for name, own in names.items()}
    if values:
        with (folder / VALUES).open("wb") as stream:
            for name, value in values.items():
                tensor, start = isinstance(value, torch.Tensor), stream.tell()
                torch_archive.save_archive(value.clone() if tensor else value, stream)
                place = storage_info(VALUES, start, stream.tell() - start)
                dtype, shape = (value.dtype, tuple(value.shape)) if tensor else (None, ())
                entries[name] = ListEntry(dtype, shape, [place])
    (folder / LIST).write_bytes(_pickled(entries, path))


class ListEntry(NamedTuple):
    """An entry to be listed.

    Attributes:
        dtype: the dtype of a tensor; None for a plain value.
        shape: the shape of a tensor.
        places: the places in the files of its parts, which follow each other in its first
            dimension and have the same size there.
    """

    dtype: "torch.dtype | None"
    shape: Sizes
    places: Sequence[Any]


def list_of(
    shards: Sequence[Shard],
    names: Mapping[str, str] = MappingProxyType({}),
    stacks: Mapping[str, Sequence[str]] = MappingProxyType({}),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """The contents of the list of entries of these files.

    Args:
        shards: all files of tensors.
        names: see ``write_list``; the names in the files are added.
        stacks: the parts of a tensor by its name, which are not listed by themselves: names in the
            shards of tensors of the same shape, of which the first dimension is 1.
        values: the places of plain values, by name.
    """
    stored = _entries(shards)
    listed = dict(stored) | {name: stored[own] for name, own in names.items()}
    for name, parts in stacks.items():
        first, *_ = those = [listed.pop(part) for part in parts]
        shape = len(those), *first.shape[1:]
        listed[name] = ListEntry(first.dtype, shape, [entry.places[0] for entry in those])
    listed |= {name: ListEntry(None, (), [place]) for name, place in values.items()}
    return _pickled(listed, lambda name: (name,))


def _entries(shards: Sequence[Shard]) -> dict[str, ListEntry]:
    """The entries of the tensors in shards, by their names there."""
    stored: dict[str, ListEntry] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            before, after = map(len, _frame_of(info))
            start, length = shard.offsets[name] - before, before + info.bytes + after
            place = storage_info(shard.name, start, length)
            stored[name] = ListEntry(info.torch_dtype, info.shape, [place])
    return stored


def _pickled(
    entries: Mapping[str, ListEntry], path: Callable[[str], tuple[str | int, ...]]
) -> bytes:
    """The contents of a list of entries; see ``write_list``."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

    listed = metadata.Metadata({}, {}, {}, metadata.StorageMeta(), version=CURRENT_DCP_VERSION)
    for name, (dtype, shape, places) in entries.items():
        about = metadata_of(dtype, shape, len(places))
        listed.planner_data[name] = path(name)
        listed.state_dict_metadata[name] = about
        offsets = [chunk.offsets for chunk in about.chunks] if dtype else [None]
        for offset, place in zip(offsets, places, strict=True):
            listed.storage_data[metadata.MetadataIndex(name, offset)] = place
    return pickle.dumps(listed, protocol=4)


def metadata_of(dtype: "torch.dtype | None", shape: Sequence[int], parts: int = 1) -> Any:
    """What a list says of an entry: a tensor, or a plain value without a dtype.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        parts: number of parts of the same size along its first dimension.
    """
    from torch.distributed.checkpoint import metadata

    if dtype is None:
        return metadata.BytesStorageMetadata()
    size = torch.Size([length // parts for length in shape[:1]] + [*shape[1:]])
    starts = [[part * length for length in size[:1]] + [0] * len(size[1:]) for part in range(parts)]
    chunks = [metadata.ChunkStorageMetadata(torch.Size(start), size) for start in starts]
    properties = metadata.TensorProperties(dtype)
    return metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)


@lru_cache(maxsize=1024)
def _frame_of(info: TensorInfo) -> tuple[bytes, bytes]:
    """The bytes before and after the data of a tensor."""
    frame, *_ = torch_archive.archive_frame({"tensor": info}, lambda saved: saved["tensor"])
    before, after = frame.values()
    return before, after
