"""SHA-256 of files, so that a manifest names exactly what was read and what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock

from growkit.base.errors import InputError
from growkit.checkpoint.atomic import flush

WORKERS = 2
"""Files that are hashed side by side."""


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


class Hashes:
    """Hashes that threads compute while other work goes on; see ``hashing``."""

    def __init__(self, pool: ThreadPoolExecutor, stop: Event) -> None:
        self._pool, self._stop, self._lock = pool, stop, Lock()
        self._found: dict[Path, Future[str]] = {}

    def add(self, *files: Path, flushed: bool = False) -> None:
        """Begin to hash files, in this order.

        Args:
            files: complete; those added before are not hashed again.
            flushed: whether they shall be on the disk as well.
        """
        with self._lock:
            for file in files:
                if file not in self._found:
                    self._found[file] = self._pool.submit(self._hash, file, flushed)

    def of(self, files: Mapping[str, Path]) -> dict[str, str]:
        """The SHA-256 of files that were added, by their names.

        Raises:
            InputError: one of them cannot be read.
        """
        return {name: self._found[file].result() for name, file in files.items()}

    def _hash(self, file: Path, flushed: bool) -> str:
        digest = sha256(file, self._stop)
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
