"""Hashes of files, so that a manifest names exactly what was read and what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from growkit.checkpoint.flushing import flush
from growkit.errors import InputError


def sha256(
    file: Path, stop: Event | None = None, advance: Callable[[int], None] = lambda count: None
) -> str:
    """The SHA-256 of a file, in hexadecimal; of its beginning, if told to stop.

    Args:
        file: the file.
        stop: tells to stop.
        advance: called with the number of bytes read, after each block.

    Raises:
        InputError: it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    try:
        with file.open("rb", buffering=0) as stream:
            while (count := stream.readinto(buffer)) and not (stop and stop.is_set()):
                digest.update(buffer[:count])
                advance(count)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); make it readable") from None
    return digest.hexdigest()


@contextmanager
def hashing(
    files: Mapping[str, Path], *, flushed: bool = False
) -> Iterator[Future[dict[str, str]]]:
    """Compute ``{name: SHA-256}`` beside other work; given up when the context ends.

    Args:
        files: by their names.
        flushed: whether the files shall be on the disk as well.
    """
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield pool.submit(_hashes, files, flushed, stop)
        finally:
            stop.set()


def _hashes(files: Mapping[str, Path], flushed: bool, stop: Event) -> dict[str, str]:
    hashes = {}
    for name, file in files.items():
        hashes[name] = sha256(file, stop)
        if flushed and not stop.is_set():
            flush(file)
    return hashes
