"""Writing the weights of a folder as a stream, and the hashes of its files.

The header of a safetensors file only needs names, shapes and dtypes, all known from the plan. So
it is written first, the tensors follow one block after the other, and no file is ever in memory.
The hash of a file follows its writing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Lock
from typing import NamedTuple

from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.base.tensors import FLOAT_BYTES, TensorInfo, Weights, total_bytes, total_parameters

WORKERS = 2
"""Tensors made at the same time: one computes while another is on its way to the disk. As many
files are hashed at the same time."""

KEPT = 48 << 20
"""Bytes that are kept for the next blocks."""

LARGE_PART = 32
"""A tensor that is a larger part of its shard comes first: none is left to one worker alone."""

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""

LARGEST = 1 << 25
"""Bytes of a block, at most, that glibc can be asked to keep."""

_NO_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})
"""Errors of file systems that cannot flush folders."""


def parse_bytes(text: str, what: str = "shard size") -> int:
    """``"500MB"`` -> 500000000.

    Args:
        text: a number and a unit.
        what: it is of.

    Raises:
        InputError: the text is not a positive number with a unit.
    """
    match = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(KB|MB|GB|TB)", str(text).strip().upper()
    )
    if not match or float(match[1]) == 0:
        raise InputError(f"{what} {text!r} is not understood; write it like 500MB or 5GB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


@dataclass(frozen=True)
class Shard:
    """One output file.

    Attributes:
        name: of the file.
        tensors: the header of every tensor, in their order in the file.
        frame: what is to be in the file apart from the tensors, by its offset.
        offsets: where every tensor begins in the file, in bytes.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    frame: Mapping[int, bytes]
    offsets: Mapping[str, int]


Save = Callable[[Weights, Path, "Iterable[Shard]"], None]
"""``write_shards`` with progress and hashes: writes tensors into the shards of a folder."""


def shards_of(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[Shard]:
    """All output files, of at most ``shard_bytes`` of tensors each.

    A tensor larger than that gets a shard of its own.
    """
    found, shards = [], divide(tensors, shard_bytes)
    for number, shard in enumerate(shards, 1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        header, offsets = header_of(shard), {}
        end = len(header)
        for name, info in shard.items():
            offsets[name], end = end, end + info.bytes
        found.append(Shard(f"model{of}.safetensors", shard, {0: header}, offsets))
    return found


def divide(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """The tensors of each shard, in their order in the file; see ``shards_of``."""
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = info
        used += info.bytes
    return [_ordered(shard) for shard in shards]


def _ordered(shard: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The order in the file, in which tensors are also written, so that its hash can follow.

    The widest dtypes come first: then every tensor begins at a multiple of its element size. Of
    these, large tensors come first.
    """
    least = total_bytes(shard) // LARGE_PART

    def rank(item: tuple[str, TensorInfo]) -> tuple[int, int]:
        return -FLOAT_BYTES[item[1].dtype], -max(item[1].bytes, least)

    return dict(sorted(shard.items(), key=rank))


def header_of(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The beginning of a file that holds tensors in this order: length, JSON, padding.

    https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        offsets = [offset, offset := offset + info.bytes]
        entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_index(shards: Sequence[Shard], folder: Path) -> None:
    """Write which shard holds which tensor, if there are several."""
    if len(shards) == 1:
        return
    every = {name: info for shard in shards for name, info in shard.tensors.items()}
    index = {
        "metadata": {"total_parameters": total_parameters(every), "total_size": total_bytes(every)},
        "weight_map": {tensor: shard.name for shard in shards for tensor in shard.tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_shards(
    weights: Weights,
    folder: Path,
    shards: Iterable[Shard],
    advance: Callable[[int], None],
    hashes: Hashes,
) -> None:
    """Write shards, one after the other.

    Every tensor has its place before any is computed, so several are made at the same time, each
    block going to disk as soon as it exists. The next shard is begun when no tensor of the one
    before is left to be begun.

    Args:
        weights: has the tensors; each is computed exactly once.
        folder: an existing folder.
        shards: asked for the next one when that can be begun.
        advance: called with the number of bytes written, after each block.
        hashes: of the files, which are computed while they are written.
    """
    stop, lock, places = Event(), Lock(), _begin_shards(folder, shards, hashes)

    def one_thread() -> None:
        """One core per tensor: several tensors are made at the same time instead."""
        torch.set_num_threads(1)
        keep_freed(KEPT)

    def work() -> None:
        while not stop.is_set():
            with lock:  # one asks for the next place at a time
                place = next(places, None)
            if place is None:
                return
            _write_tensor(weights, place, advance, stop)

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, initializer=one_thread) as pool:
            jobs = [pool.submit(work) for _ in range(WORKERS)]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)  # a worker's choice became that of every later thread
    for job in jobs:
        job.result()


class _Place(NamedTuple):
    """Where a tensor is to be written, and what else is of its file."""

    tensor: str
    file: Path
    offset: int
    written: _Written


def _begin_shards(folder: Path, shards: Iterable[Shard], hashes: Hashes) -> Iterator[_Place]:
    """Begin one file after the other, and give the places of its tensors."""
    for shard in shards:
        file, written = folder / shard.name, _Written(shard)
        with file.open("r+b" if file.exists() else "wb") as stream:
            for offset, text in shard.frame.items():
                stream.seek(offset)
                stream.write(text)
        hashes.add(file, flushed=True, written=written)
        for name in shard.tensors:
            yield _Place(name, file, shard.offsets[name], written)


def _write_tensor(
    weights: Weights, place: _Place, advance: Callable[[int], None], stop: Event
) -> None:
    offset = place.offset
    with place.file.open("r+b", buffering=0) as stream:
        for block in weights.blocks(place.tensor):
            data = memoryview(block.contiguous().flatten().view(torch.uint8).numpy().data)
            while data:  # a write may be partial
                if stop.is_set():
                    return
                count = os.pwrite(stream.fileno(), data, offset)
                data = data[count:]
                offset += count
                place.written.add(place.tensor, count)
                advance(count)
    assert offset - place.offset == weights.tensors[place.tensor].bytes, place.tensor


def keep_freed(most: int) -> None:
    """Let the process keep so many bytes that are free, for blocks of up to ``LARGEST`` bytes.

    glibc gives large blocks back as they are freed, and gets every page of the next one anew, each
    with a fault and filled with zeros. Nothing happens where the C library is another one.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
            libc.mallopt(M_TRIM_THRESHOLD, most)


def give_back() -> None:
    """Give the system back what is free.

    glibc keeps what is between tensors that are still in use, a fifth of a proof's peak (measured).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def flush(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_FOLDERS:
            raise
    finally:
        os.close(descriptor)


# Hashes


class _Written:
    """How far a shard is written, from its beginning on."""

    def __init__(self, shard: Shard) -> None:
        self._left = {name: info.bytes for name, info in shard.tensors.items() if info.bytes}
        self._ends = {name: shard.offsets[name] + count for name, count in self._left.items()}
        self._changed = Condition()

    def add(self, tensor: str, count: int) -> None:
        """Count bytes of a tensor that have been written."""
        with self._changed:
            self._left[tensor] -= count
            if not self._left[tensor]:
                del self._left[tensor]
            self._changed.notify_all()

    def beyond(self, position: int, stop: Event) -> int:
        """How many bytes there are, once there are more than so many; all, if that is all."""
        with self._changed:
            while not stop.is_set():
                first = next(iter(self._left), None)  # of those that are not complete
                found = sys.maxsize if first is None else self._ends[first] - self._left[first]
                if found > position:
                    return found
                self._changed.wait(0.1)
        return position


def sha256(
    file: Path,
    stop: Event | None = None,
    advance: Callable[[int], None] = lambda count: None,
    written: _Written | None = None,
) -> str:
    """The SHA-256 of a file, in hexadecimal; of its beginning, if it is to stop.

    Args:
        file: the file.
        stop: set to stop.
        advance: called with the number of bytes read, after each block.
        written: how far the file is written, if it is not complete.

    Raises:
        InputError: it cannot be read.
    """
    digest, stop, done = hashlib.sha256(), stop or Event(), 0
    buffer = memoryview(bytearray(1 << 20))
    try:
        with file.open("rb", buffering=0) as stream:
            while not stop.is_set():
                room = written.beyond(done, stop) - done if written else len(buffer)
                count = stream.readinto(buffer[:room])
                if not count:
                    break
                digest.update(buffer[:count])
                done += count
                advance(count)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); make it readable") from None
    return digest.hexdigest()


class Hashes:
    """Hashes that threads compute in the background; see ``hashing``."""

    def __init__(self, pool: ThreadPoolExecutor, stop: Event) -> None:
        self._pool, self._stop, self._lock = pool, stop, Lock()
        self._found: dict[Path, Future[str]] = {}

    def add(self, *files: Path, flushed: bool = False, written: _Written | None = None) -> None:
        """Begin to hash files, in this order.

        Args:
            *files: those added before are not hashed again.
            flushed: whether they shall be on the disk as well.
            written: how far they are written; None if they are complete.
        """
        with self._lock:
            for file in files:
                if file not in self._found:
                    self._found[file] = self._pool.submit(self._hash, file, flushed, written)

    def of(self, files: Mapping[str, Path]) -> dict[str, str]:
        """The SHA-256 of files that were added, by their names.

        Raises:
            InputError: one of them cannot be read.
        """
        return {name: self._found[file].result() for name, file in files.items()}

    def _hash(self, file: Path, flushed: bool, written: _Written | None) -> str:
        digest = sha256(file, self._stop, written=written)
        if flushed and not self._stop.is_set():
            flush(file)
        return digest


@contextmanager
def hashing() -> Iterator[Hashes]:
    """Threads that hash files; when the context ends, what is left is given up."""
    stop = Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            yield Hashes(pool, stop)
        finally:
            stop.set()
