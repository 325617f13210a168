"""Hashes of files, so that a manifest names exactly what a model was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event


@contextmanager
def hashing(files: Iterable[Path]) -> Iterator[Future[dict[str, str]]]:
    """Compute ``{file name: SHA-256}`` beside other work; given up when the context ends."""
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield pool.submit(_hashes, list(files), stop)
        finally:
            stop.set()


def _hashes(files: list[Path], stop: Event) -> dict[str, str]:
    hashes = {}
    buffer = memoryview(bytearray(1 << 20))
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as stream:
            while (count := stream.readinto(buffer)) and not stop.is_set():
                digest.update(buffer[:count])
        hashes[file.name] = digest.hexdigest()
    return hashes
