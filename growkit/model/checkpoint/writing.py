"""Writing the weights of a folder as a stream, and hashing its files.

The header of a safetensors file needs only names, shapes and dtypes, which the plan knows. So it is
written first, the tensors follow block by block, and no file is ever in memory as a whole. A file
is hashed while it is written.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition, Event, Lock

from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.base.tensors import TensorInfo, Weights, total_bytes, total_parameters
from growkit.base.workers import workers

WORKERS = 2
"""Number of tensors in progress: one is computed while another goes to the disk. As many files are
hashed at the same time."""

KEPT = 48 << 20
"""Freed bytes that the process keeps for the next blocks."""

LARGE_PART = 32
"""Tensors larger than this part of their shard come first, so no worker ends alone with one."""

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""

WRITTEN = 1 << 18
"""Bytes to write at a time. For more, Linux looks for as many in a row, which may take several
times as long as to copy them (measured)."""

SYNC_WRITE = 2
"""sync_file_range(2): begin to write, and do not wait."""

LARGEST = 1 << 25
"""Largest block that glibc can keep, in bytes."""

_NO_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})
"""Errors of file systems that cannot flush folders."""


def parse_bytes(text: str, what: str = "shard size") -> int:
    """Parse a size, such as ``500MB``, into bytes.

    Args:
        text: a number and a unit.
        what: name of the size in messages.

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
        name: name of the file.
        tensors: the header of every tensor, in the order of the file.
        frame: the bytes around the data of tensors, by their offset in the file.
        offsets: offset of every tensor's data in the file, in bytes.
        checksums: offsets at which the file holds the CRC-32 of a tensor's data, by tensor.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    frame: Mapping[int, bytes]
    offsets: Mapping[str, int]
    checksums: Mapping[str, Sequence[int]] = field(default_factory=dict)


def write_frame(shard: Shard, folder: Path, *, whole: bool = False) -> None:
    """Write a file without the data of its tensors.

    Args:
        shard: the file.
        folder: its folder.
        whole: whether the file gets its full size, which takes no disk space.
    """
    file = folder / shard.name
    with file.open("r+b" if file.exists() else "wb") as stream:
        for offset, content in shard.frame.items():
            stream.seek(offset)
            stream.write(content)
        if whole:
            ends = (shard.offsets[name] + info.bytes for name, info in shard.tensors.items())
            stream.truncate(max(stream.tell(), *ends))


Save = Callable[[Weights, Path, "Iterable[Shard]"], None]
"""``write_shards`` with progress and hashes given."""


def shards_of(
    tensors: Mapping[str, TensorInfo], shard_bytes: int, program: str = "pt"
) -> list[Shard]:
    """Plan the output files, with at most ``shard_bytes`` of tensors each.

    A larger tensor gets a shard of its own. ``program`` is the format that their headers name.
    """
    planned, shards = [], divide(tensors, shard_bytes)
    for number, shard in enumerate(shards, 1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        header, offsets = header_of(shard, program), {}
        end = len(header)
        for name, info in shard.items():
            offsets[name], end = end, end + info.bytes
        planned.append(Shard(f"model{of}.safetensors", shard, {0: header}, offsets))
    return planned


def divide(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Divide tensors into shards, each in the order of its file; see ``shards_of``."""
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = info
        used += info.bytes
    return [_sort(shard) for shard in shards]


def _sort(shard: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Sort tensors for a file. They are written in this order, so that hashing can follow.

    The widest dtypes come first, so that every tensor begins at a multiple of its element size.
    Within a dtype, large tensors come first.
    """
    least = total_bytes(shard) // LARGE_PART

    def rank(item: tuple[str, TensorInfo]) -> tuple[int, int]:
        return -item[1].element_bytes, -max(item[1].bytes, least)

    return dict(sorted(shard.items(), key=rank))


def header_of(tensors: Mapping[str, TensorInfo], program: str = "pt") -> bytes:
    """The beginning of a safetensors file with tensors in this order: length, JSON, padding.

    https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {"__metadata__": {"format": program}}
    offset = 0
    for name, info in tensors.items():
        offsets = [offset, offset := offset + info.bytes]
        entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_of(shards: Sequence[Shard]) -> dict[str, bytes]:
    """The index of tensors by shard, by its file's name; empty if there is only one shard."""
    if len(shards) == 1:
        return {}
    every = {name: info for shard in shards for name, info in shard.tensors.items()}
    index = {
        "metadata": {"total_parameters": total_parameters(every), "total_size": total_bytes(every)},
        "weight_map": {tensor: shard.name for shard in shards for tensor in shard.tensors},
    }
    return {"model.safetensors.index.json": f"{json.dumps(index, indent=2)}\n".encode()}


def write_shards(
    weights: Weights,
    folder: Path,
    shards: Iterable[Shard],
    advance: Callable[[int], None],
    hashes: Hashes,
) -> None:
    """Write shards, one after the other.

    Every tensor has a place before it is computed, so several are computed at the same time, and
    each block is written as soon as it exists.

    Args:
        weights: the tensors; each is computed exactly once.
        folder: an existing folder.
        shards: the shards; the next one is requested when the previous one is written.
        advance: called with the number of bytes written, after each block.
        hashes: receives the files, to hash them while they are written.
    """
    stop = Event()
    with workers(WORKERS, partial(keep_freed, KEPT)) as pool:
        try:
            for shard in shards:
                file, written = folder / shard.name, _Written(shard)
                write_frame(shard, folder)
                if not shard.checksums:
                    hashes.add(file, flushed=True, written=written)
                write = partial(_write_tensor, weights, file, shard, written, advance, stop)
                jobs = [pool.submit(write, name) for name in shard.tensors]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
                if shard.checksums:
                    _write_checksums(file, shard, [job.result() for job in jobs])
                    hashes.add(file, flushed=True)
        finally:
            stop.set()


def _write_tensor(
    weights: Weights,
    file: Path,
    shard: Shard,
    written: _Written,
    advance: Callable[[int], None],
    stop: Event,
    name: str,
) -> int:
    """Write a tensor; return the CRC-32 of its data."""
    offset, checksum = shard.offsets[name], 0
    with file.open("r+b", buffering=0) as stream:
        for block in weights.blocks(name):
            if stop.is_set():
                return checksum
            data = memoryview(block.contiguous().flatten().view(torch.uint8).numpy().data)
            write_at(stream.fileno(), data, offset)
            if name in shard.checksums:
                checksum = zlib.crc32(data, checksum)
            offset += len(data)
            written.add(name, len(data))
            advance(len(data))
    assert offset - shard.offsets[name] == shard.tensors[name].bytes, name
    return checksum


def _write_checksums(file: Path, shard: Shard, checksums: Sequence[int]) -> None:
    with file.open("r+b") as stream:
        for name, checksum in zip(shard.tensors, checksums, strict=True):
            for place in shard.checksums.get(name, ()):
                stream.seek(place)
                stream.write(checksum.to_bytes(4, "little"))


def keep_freed(limit: int) -> None:
    """Let the process keep freed memory for blocks of up to ``LARGEST`` bytes.

    By default glibc returns large blocks to the system at once, and every page of the next block
    costs a page fault. Other C libraries are left as they are.

    Args:
        limit: limit for the freed memory that is kept, in bytes.
    """
    with suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
        libc.mallopt(M_TRIM_THRESHOLD, limit)


def give_back() -> None:
    """Return freed memory to the system.

    glibc keeps free memory between tensors in use, a fifth of a proof's peak (measured).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes to a file, and let the disk begin to store them where the system can.

    Else it is idle until a file is complete, or until much of the memory waits for it.
    """
    begin, count = offset, len(data)
    while data:  # a write may be partial
        written = os.pwrite(descriptor, data[:WRITTEN], offset)
        data, offset = data[written:], offset + written
    with suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.sync_file_range(descriptor, *map(ctypes.c_int64, (begin, count)), SYNC_WRITE)


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
    """Progress of a shard: how far it is written without gaps."""

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
        """Wait until more than ``position`` bytes are written, and return how many are.

        The result is at least the file's size once it is complete, and ``position`` if stopped.
        """
        with self._changed:
            while not stop.is_set():
                first = next(iter(self._left), None)  # the first incomplete tensor
                written = sys.maxsize if first is None else self._ends[first] - self._left[first]
                if written > position:
                    return written
                self._changed.wait(0.1)
        return position


def sha256(
    file: Path,
    stop: Event | None = None,
    advance: Callable[[int], None] = lambda count: None,
    written: _Written | None = None,
) -> str:
    """Compute the SHA-256 of a file, in hexadecimal; if stopped, that of its beginning.

    Args:
        file: the file.
        stop: event that stops the computation.
        advance: called with the number of bytes read, after each block.
        written: progress of the file; None if it is complete.

    Raises:
        InputError: the file cannot be read.
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
    """Hashes of files, computed by threads in the background; see ``hashing``."""

    def __init__(self, pool: ThreadPoolExecutor, stop: Event) -> None:
        self._pool, self._stop, self._lock = pool, stop, Lock()
        self._found: dict[Path, Future[str]] = {}

    def add(self, *files: Path, flushed: bool = False, written: _Written | None = None) -> None:
        """Begin to hash files, in this order.

        Args:
            *files: the files; one that was added before is not hashed again.
            flushed: whether to flush the files to the disk, too.
            written: progress of the files; None if they are complete.
        """
        with self._lock:
            for file in files:
                if file not in self._found:
                    self._found[file] = self._pool.submit(self._hash, file, flushed, written)

    def of(self, files: Mapping[str, Path]) -> dict[str, str]:
        """The SHA-256 of added files, by name; waits until they are computed.

        Raises:
            InputError: one of the files cannot be read.
        """
        return {name: self._found[file].result() for name, file in files.items()}

    def _hash(self, file: Path, flushed: bool, written: _Written | None) -> str:
        digest = sha256(file, self._stop, written=written)
        if flushed and not self._stop.is_set():
            flush(file)
        return digest


@contextmanager
def hashing() -> Iterator[Hashes]:
    """Run threads that hash files; the end of the context stops unfinished work."""
    stop = Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            yield Hashes(pool, stop)
        finally:
            stop.set()
