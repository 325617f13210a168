"""What is finished of an output that is being written, for a run that goes on with it.

A line is written when a shard is complete and on the disk, with its SHA-256: whatever has a line
was finished, and it can be seen whether it still is what it was. Every process that writes has
a journal of its own, in the hidden folder beside the output; that of the first also says what is
being made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Semaphore
from typing import Any

from growkit.checkpoint.flushing import flush
from growkit.checkpoint.hashing import sha256

JOURNAL = "growkit.journal."
"""What journals are called, before the number of the process."""

MOST_BYTES = 1 << 26
"""Size of a journal, at most: 100,000 shards."""

LAG = 2
"""Shards that may wait for their hash: a kill costs no more than these and those being written."""

Plan = dict[str, str]
"""What is being made: everything on which the bytes of its shards depend, or its SHA-256."""


@dataclass(frozen=True)
class Finished:
    """A shard as it was when it was finished: its size in bytes and its SHA-256."""

    bytes: int
    sha256: str


class Journal:
    """The journal of one process that writes shards.

    Hashes are computed beside the writing, which waits for them when they fall behind. What is read
    is not hashed before a shard is finished, so that a small output is written by all cores.

    Args:
        folder: the hidden folder.
        number: of the process.
        check: raises where what is read has changed since the run began: what was finished after
            that may be anything.
    """

    def __init__(self, folder: Path, number: int, check: Callable[[], None]) -> None:
        self._file = folder / f"{JOURNAL}{number}"
        self._check = check
        self._stop = Event()
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._lock, self._behind = Lock(), Semaphore(LAG)
        self._read: Callable[[], dict[str, str]] | None = None
        self._first: Future[dict[str, str]] | None = None
        self._jobs: list[Future[None]] = []
        self._found: dict[str, Finished] = {}

    def begin(self, read: Mapping[str, Path], plan: Callable[[Mapping[str, str]], Plan]) -> None:
        """Say what is being made, which is written down before the first shard that is finished.

        Args:
            read: files that are read for it, by name.
            plan: gives what is being made, from the SHA-256 of these.
        """

        def first() -> dict[str, str]:
            hashes = {name: sha256(file, self._stop) for name, file in read.items()}
            if not self._stop.is_set():
                self._check()
                self._write({"plan": plan(hashes)})
            return hashes

        self._read = first

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of what is read."""
        return self._begun().result()

    def finish(self, file: Path) -> None:
        """A shard is complete; waits while ``LAG`` others are to be hashed."""
        self._begun()
        self._behind.acquire()
        self._jobs.append(self._pool.submit(self._finish, file))

    def note(self, name: str, finished: Finished) -> None:
        """A shard is complete, and what it should be."""
        self._begun()
        self._jobs.append(self._pool.submit(self._note, name, finished))

    def _begun(self) -> Future[dict[str, str]]:
        with self._lock:
            if self._first is None:
                self._first = self._pool.submit(self._read or dict)
            return self._first

    def finished(self) -> dict[str, Finished]:
        """Every shard that is, once all are of which one knows."""
        for job in self._jobs:
            job.result()
        return dict(self._found)

    def close(self) -> None:
        """Nothing more is finished."""
        self._stop.set()
        self._pool.shutdown()
        self._read = None  # which holds what was planned, and this

    def _finish(self, file: Path) -> None:
        try:
            digest = sha256(file, self._stop)
            if not self._stop.is_set():
                flush(file)
                self._begun().result()  # nothing is finished before it is known of what
                self._note(file.name, Finished(file.stat().st_size, digest))
        finally:
            self._behind.release()

    def _note(self, name: str, finished: Finished) -> None:
        if not self._stop.is_set():
            self._check()
            self._found[name] = finished
            self._write({"file": name, "bytes": finished.bytes, "sha256": finished.sha256})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._stop.is_set():
            return
        text = json.dumps(line) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self._file, flags, 0o600)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def journal(folder: Path, number: int, check: Callable[[], None]) -> Iterator[Journal]:
    """A journal, closed in the end; see ``Journal``."""
    kept = Journal(folder, number, check)
    try:
        yield kept
    finally:
        kept.close()


def read_journals(folder: Path) -> tuple[Plan | None, dict[str, Finished]]:
    """What was being made in a hidden folder, and which shards of it are finished.

    Args:
        folder: left by a run that is dead. Lines that were not finished, or are none, are passed
            over: what they would name is written again.

    Returns:
        None for what was being made, where nothing says so.
    """
    plan: Plan | None = None
    finished: dict[str, Finished] = {}
    for file in sorted(folder.glob(f"{JOURNAL}*")):
        for line in _lines(file):
            match line:
                case {"plan": dict(made)} if all(isinstance(each, str) for each in made.values()):
                    plan = made
                case {"file": str(name), "bytes": int(count), "sha256": str(digest)}:
                    finished[name] = Finished(count, digest)
    return plan, finished


def resumable(folder: Path) -> bool:
    """Whether a later run can go on with a hidden folder: something is finished, and of what."""
    plan, finished = read_journals(folder)
    return plan is not None and bool(finished)


def _lines(file: Path) -> Iterator[Any]:
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MOST_BYTES:
            return
        content = file.read_bytes()
    except OSError:
        return
    for line in content.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
