"""The list of entries in a folder of torch.distributed.checkpoint, a pickle of a stranger.

Nothing of torch is made while it is read. Names of what such a list is made of become stand-ins
that only keep what they are given; every other name is refused. What comes out is looked at piece
by piece: shapes, parts that make up every tensor, and where each part lies.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from growkit.base.errors import InputError, reason
from growkit.checkpoint.elsewhere import LIST as LIST
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import STORED_NAMES
from growkit.checkpoint.weight_file import MOST_DIMENSIONS, MOST_SIZE

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

OPCODES = frozenset(
    b"".join(
        (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
            *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT),
            *(pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
            *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
            *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
        )
    )
)
"""What a list of entries is written with, by protocols from 2 on."""

MOST_CUT = 6
"""Dimensions, at most, in which a tensor is cut into parts."""

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


class _Entries(dict[Any, Any]):
    """A dictionary by names and the like; a few nested tuples would take for ever as a key."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | _StandIn):
            raise TypeError("an entry has no name")
        super().__setitem__(key, value)


class _Opcodes(dict[int, Any]):
    """What a list is written with; not sets, say, nor arrays of a size that is only claimed."""

    def __missing__(self, opcode: int) -> Any:
        raise pickle.UnpicklingError(f"opcode {opcode} is nothing that such a list is written with")


class _Unpickler(pickle._Unpickler):
    """Reads a list of entries with stand-ins for all of torch."""

    dispatch = _Opcodes(
        {code: load for code, load in pickle._Unpickler.dispatch.items() if code in OPCODES}
    )

    def find_class(self, module: str, name: str) -> Any:
        if name not in MADE_OF.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that such a list is made of")
        if module == "torch":
            return tuple if name == "Size" else name
        return _Entries if name == "OrderedDict" else type(name, (_StandIn,), {})

    def _empty(self) -> None:
        cast(Any, self).append(_Entries())

    dispatch[pickle.EMPTY_DICT[0]] = _empty


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


def _step(found: Any) -> str:
    """A name, or the number of an entry in a list, on the way to an entry."""
    if not isinstance(found, str | int):
        raise TypeError("it lies below something that has no name")
    return str(found)


def _sizes(found: Any) -> Sizes:
    if not isinstance(found, tuple | list) or len(found) > MOST_DIMENSIONS:
        raise TypeError("some whole numbers were expected")
    if not all(type(n) is int and 0 <= n <= MOST_SIZE for n in found):
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
    names = tuple(map(_step, path)) if isinstance(path, tuple) and path else (name,)
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
    """Every element of a tensor lies in one of its parts, and in no other.

    How many parts an element lies in, as a function of its place, follows from their corners alone,
    signed in turn: those inside must cancel, and those of the tensor be left. This takes as long as
    there are parts, whatever these are.

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
        boxes.append(tuple(zip(offsets, ends, strict=True)))
    if 0 in shape:
        return
    whole = tuple((0, size) for size in shape)
    cut = [d for d, edges in enumerate(whole) if any(box[d] != edges for box in boxes)]
    if len(cut) > MOST_CUT:
        raise ValueError(f"it is cut in more than {MOST_CUT} dimensions")
    left: defaultdict[Sizes, int] = defaultdict(int)
    for sign, box in ((-1, whole), *((1, box) for box in boxes)):
        for other, corner in _corners([box[d] for d in cut]):
            left[corner] += sign * other
    if any(left.values()):
        raise ValueError("its parts do not make it up")


def _corners(box: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Sizes]]:
    """The corners of a box, each with its sign."""
    for ends in product((0, 1), repeat=len(box)):
        yield (-1) ** sum(ends), tuple(edges[end] for edges, end in zip(box, ends, strict=True))
