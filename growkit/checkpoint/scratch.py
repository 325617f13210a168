"""Folders for work in progress, which vanish with their run, or show later runs that it is dead.

Each holds a file that is locked as long as its run lives: the system lets go of it when the run
ends, however it ends. A folder with a lock that nobody holds is what a killed run has left.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from growkit.base.errors import InputError, reason

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: nobody is ever taken for dead
    fcntl = None

LOCK = "growkit.lock"
ENDING = 8
"""Characters at the end of the name of such a folder that are random."""

NAMES = rf"(\..+\.|growkit-[a-z]+-)[0-9a-f]{{{ENDING}}}"
"""What such folders are called, beside an output or among temporary files."""

MODE = 0o700
"""Who may do what with such a folder."""


class Scratch:
    """A folder with a name of its own.

    It is made by ``make``, not at once: an interrupt may come at any moment, and whoever is to
    clean up needs to know the folder by then.

    Args:
        stem: the path without the random end of its name.
    """

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._lock: int | None = None
        self.path = self._any_path()

    def _any_path(self) -> Path:
        return self._stem.with_name(self._stem.name + secrets.token_hex(ENDING // 2))

    def make(self) -> None:
        """Make the folder.

        Raises:
            OSError: it cannot be made.
        """
        while self._lock is None:
            try:
                self.path.mkdir(mode=MODE)
                self._lock = _make_lock(self.path / LOCK)
            except FileExistsError:
                self.path = self._any_path()

    def note(self, text: str) -> None:
        """Leave word to whoever finds the folder when the run is dead."""
        assert self._lock is not None
        os.pwrite(self._lock, text.encode(), 0)

    def close(self) -> None:
        """Delete the folder."""
        clear(self.path)
        self.release()

    def release(self) -> None:
        """Let others have what is left of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """A folder for temporary files.

    Raises:
        InputError: the disk is full.
    """
    scratch = temporary_scratch(kind)
    try:
        scratch.make()
        yield scratch.path
    except Exception as error:  # safetensors has an error of its own, with the number in its words
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or f"(os error {errno.ENOSPC})" in str(error):
            raise _no_room(scratch.path.parent, error) from error
        raise
    finally:
        scratch.close()


def temporary_scratch(kind: str) -> Scratch:
    """A folder for temporary files, to be made and closed."""
    return Scratch(Path(tempfile.gettempdir()) / f"growkit-{kind}-")


def _no_room(place: Path, error: Exception) -> InputError:
    return InputError(
        f"{place} cannot take temporary files ({reason(error)}); set TMPDIR to a folder that has "
        "room"
    )


def noted(folder: Path) -> str:
    """What a run left word of; empty if it left none.

    Raises:
        OSError: that cannot be read.
    """
    try:
        return (folder / LOCK).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def clear(folder: Path) -> None:
    """Delete such a folder as far as that is possible, its lock at the end."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()


@contextmanager
def holding(file: Path) -> Iterator[None]:
    """A lock of one's own in a folder of another process, which shows it that one lives.

    Raises:
        OSError: it cannot be made: the folder is gone, say.
    """
    # It gets its name when it is locked: a name without a lock means that its process has ended.
    unnamed = file.with_name(f"{file.name}.new")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        _take(descriptor, wait=True)
        os.replace(unnamed, file)
        yield
    finally:
        os.close(descriptor)


def held(file: Path) -> bool | None:
    """Whether such a lock is held by a process that lives; None if nobody ever made it."""
    try:
        descriptor = os.open(file, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    try:
        return fcntl is None or not _take(descriptor, wait=False)
    finally:
        os.close(descriptor)


@contextmanager
def dead(folder: Path) -> Iterator[bool]:
    """Whether a run that is dead has left a folder, which then is the caller's meanwhile."""
    descriptor = None
    try:
        with suppress(OSError):
            descriptor = os.open(folder / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        yield descriptor is not None and _take(descriptor, wait=False)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _make_lock(file: Path) -> int | None:
    """A file that is locked; None if another run took the folder for a dead one's meanwhile."""
    descriptor = None
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _take(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except FileNotFoundError:
        return None
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _take(descriptor: int, *, wait: bool) -> bool:
    """Lock a file; false if someone else has done so, or the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
