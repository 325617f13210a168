"""The list of entries in a folder of torch.distributed.checkpoint, a pickle of a stranger.

Nothing of torch is made while it is read. Names of what such a list is made of become stand-ins
that only keep what they are given; every other name is refused. What comes out is looked at piece
by piece: shapes, parts that make up every tensor, and where each part lies.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from growkit.checkpoint.elsewhere import LIST as LIST
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import STORED_NAMES
from growkit.errors import InputError, reason

MOST_BYTES = 1 << 25
"""Size of a list, at most: a hundred thousand parts take half of it."""

REMEDY = "copy the checkpoint again, or save it again with torch.distributed.checkpoint"

PATHS = {"Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}

MADE_OF = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "complex32", "complex64", "complex128", *STORED_NAMES.values()},
    "collections": {"OrderedDict"},
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}
"""What the list of entries is made of."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of a tensor, or a value.

    Attributes:
        offsets: where it begins in every dimension.
        sizes: of it in every dimension.
        file: where it lies, relative to the folder.
        begin: its first byte there.
        length: bytes that it takes there.
    """

    offsets: Sizes
    sizes: Sizes
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Listed:
    """An entry.

    Attributes:
        path: its name, below the names of the states that it lies in.
        shape: of a tensor; None for a value.
        dtype: of a tensor, as torch calls it.
        parts: that make it up; one of a value.
    """

    path: tuple[str, ...]
    shape: Sizes | None
    dtype: str | None
    parts: tuple[Part, ...]


def read_list(folder: Folder) -> dict[str, Listed]:
    """The entries of a folder by their names; each of them is there as a whole.

    Raises:
        InputError: the list holds something else, or a part of an entry is missing.
    """
    content = folder.bytes(LIST, MOST_BYTES)
    with refusing(folder, LIST):
        # Python's own code has no table that a number in the file makes large.
        listed = _fields(_Unpickler(io.BytesIO(content)).load(), "Metadata")
        entries, paths = _mapping(listed["state_dict_metadata"]), listed.get("planner_data")
        parts = _parts(_mapping(listed["storage_data"]))
    sizes: dict[str, int] = {}
    for (name, _), (file, begin, length) in parts.items():
        with refusing(folder, name):
            if file not in sizes:
                found = folder.find(file)
                if found is None:
                    raise ValueError(f"{file} is missing")
                sizes[file] = found.stat().st_size
            if begin + length > sizes[file]:
                raise ValueError(f"{file} has been cut off")
    read = {}
    for name, of in entries.items():
        with refusing(folder, str(name)):
            read[_text(name)] = _listed(name, of, parts, paths)
    return read


@contextmanager
def refusing(folder: Folder, what: str) -> Iterator[None]:
    """Turn whatever damaged files lead to into a sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} cannot be read from {folder} ({reason(error)}); {REMEDY}"
        ) from None


class _StandIn:
    """Keeps what something in a list is made of."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Reads a list of entries with stand-ins for all of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in MADE_OF.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that such a list is made of")
        if module == "torch":
            return tuple if name == "Size" else name
        return dict if name == "OrderedDict" else type(name, (_StandIn,), {})


def _fields(found: Any, kind: str) -> dict[str, Any]:
    """What an object of this kind is made of."""
    fields = getattr(found, "state", None)
    if type(found).__name__ != kind or not isinstance(fields, dict | None):
        raise TypeError(f"{kind} was expected in the list of entries")
    return fields or {}


def _mapping(found: Any) -> dict[Any, Any]:
    if not isinstance(found, dict):
        raise TypeError("it is no list of entries")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str) or not found:
        raise TypeError("an entry has no name")
    return found


def _sizes(found: Any) -> Sizes:
    if not isinstance(found, tuple | list) or not all(type(n) is int and n >= 0 for n in found):
        raise TypeError("whole numbers were expected")
    return tuple(found)


def _parts(stored: Mapping[Any, Any]) -> dict[tuple[str, Sizes], tuple[str, int, int]]:
    """File, begin and length of every part, by the name of its entry and where it begins in it."""
    found = {}
    for index, place in stored.items():
        which, where = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise ValueError("its parts are compressed or the like")
        offset = which.get("offset")
        key = _text(which["fqn"]), () if offset is None else _sizes(offset)
        begin, length = _sizes((where["offset"], where["length"]))
        found[key] = _text(where["relative_path"]), begin, length
    return found


def _listed(
    name: str, of: Any, stored: Mapping[tuple[str, Sizes], tuple[str, int, int]], paths: Any
) -> Listed:
    path = paths.get(name) if isinstance(paths, dict) else None
    names = tuple(map(str, path)) if isinstance(path, tuple) and path else (name,)
    if type(of).__name__ == "BytesStorageMetadata":
        pairs: list[tuple[Sizes, Sizes]] = [((), ())]
        shape = dtype = None
    elif type(of).__name__ == "TensorStorageMetadata":
        fields = _fields(of, "TensorStorageMetadata")
        shape = _sizes(fields["size"])
        dtype = _dtype(fields["properties"])
        chunks = [_fields(each, "ChunkStorageMetadata") for each in fields["chunks"]]
        pairs = [(_sizes(each["offsets"]), _sizes(each["sizes"])) for each in chunks]
        _check_whole(shape, pairs)
    else:
        raise TypeError("it is of an unknown kind")
    if any((name, offsets) not in stored for offsets, _ in pairs):
        raise ValueError("a part of it is missing")
    parts = [Part(offsets, sizes, *stored[name, offsets]) for offsets, sizes in pairs]
    return Listed(names, shape, dtype, tuple(parts))


def _dtype(properties: Any) -> str:
    given = getattr(properties, "state", None)
    if type(properties).__name__ != "TensorProperties" or not isinstance(given, tuple):
        raise TypeError("it has no properties of a tensor")
    return _text(given[0])


def _check_whole(shape: Sizes, parts: Sequence[tuple[Sizes, Sizes]]) -> None:
    """Parts lie inside of a tensor, beside each other, and are as many elements as it has.

    Raises:
        ValueError: they do not make it up.
    """
    boxes = []
    for offsets, sizes in parts:
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError("its parts have other dimensions")
        ends = tuple(map(sum, zip(offsets, sizes, strict=True)))
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError("its parts reach beyond it")
        if prod(sizes):
            boxes.append((offsets, ends))
    total = sum(prod(sizes) for _, sizes in parts)
    if total != prod(shape) or len(set(parts)) != len(parts) or _overlap(boxes):
        raise ValueError("its parts do not make it up")


def _overlap(boxes: list[tuple[Sizes, Sizes]]) -> bool:
    """Whether any two share an element."""
    if len(boxes) < 2:
        return False
    dimensions = range(len(boxes[0][0]))
    # Along the dimension that divides them most, few are open at a time.
    along = max(dimensions, key=lambda each: len({begin[each] for begin, _ in boxes}))
    opened: list[tuple[Sizes, Sizes]] = []
    for begin, end in sorted(boxes, key=lambda box: box[0][along]):
        opened = [each for each in opened if each[1][along] > begin[along]]
        for other_begin, other_end in opened:
            if all(begin[d] < other_end[d] and other_begin[d] < end[d] for d in dimensions):
                return True
        opened.append((begin, end))
    return False
