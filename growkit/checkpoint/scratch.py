"""Temporary folders, which outlive their run only if it is killed.

A temporary folder contains a file that is locked while its run is alive: the system releases the
lock when the run ends, even if it is killed. So a folder with a free lock was left by a killed run.

A fault of the disk with these folders says nothing about a model, and ends the run.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from growkit.base.errors import PlaceError, called, faults, reason, system_error

LOCK = "growkit.lock"
ENDING = 8
"""Number of random characters at the end of a temporary folder's name."""

NAMES = rf"(\..+\.|growkit-[a-z]+-)[0-9a-f]{{{ENDING}}}"
"""Names of temporary folders, next to an output or in the system's temporary folder."""

MODE = 0o700
"""Permissions of temporary folders."""


STANDS_FOR = {
    "config": "the config",
    "inference": "a small model of the class",
    "outline": "the planned model",
    "reload": "the saved copy",
    "tokenizer": "a copy of the tokenizer",
}
"""Names in messages of what temporary folders hold."""


class Scratch:
    """A temporary folder with a unique name.

    ``make`` creates the folder, and not the constructor, so that an interrupt at any moment finds
    the object that deletes it.

    Args:
        stem: the path without the random end of its name.
    """

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._lock: int | None = None
        self.path = self._random_path()

    def _random_path(self) -> Path:
        return self._stem.with_name(self._stem.name + secrets.token_hex(ENDING // 2))

    def make(self) -> None:
        """Create and lock the folder.

        Raises:
            OSError: the folder cannot be created.
        """
        while self._lock is None:
            with suppress(FileExistsError):
                self.path.mkdir(mode=MODE)
                # Before the folder is locked, another run may delete it as a dead run's.
                with suppress(FileNotFoundError):
                    self._lock = _new_lock(self.path / LOCK)
                    if os.fstat(self._lock).st_nlink:
                        return
                    self.release()
            self.path = self._random_path()

    def close(self) -> None:
        """Delete the folder."""
        clear(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock, and leave the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """Create a folder for temporary files, which the end of the context deletes.

    Raises:
        PlaceError: the disk is full, or has another fault.
    """
    scratch = temporary_scratch(kind)
    try:
        with using(scratch):
            scratch.make()
            with called(scratch.path, STANDS_FOR.get(kind, "a temporary folder")):
                yield scratch.path
    finally:
        scratch.close()


@contextmanager
def using(scratch: Scratch) -> Iterator[None]:
    """Turn errors of the system with temporary files in this block into errors of the place.

    Raises:
        PlaceError: instead of an ``OSError``, or of a library's error with the number of one.
    """
    try:
        yield
    except Exception as error:
        cause = _cause(error, scratch.path)
        if cause is None:
            raise
        raise PlaceError(
            f"{scratch.path.parent} cannot hold temporary files ({reason(cause)}); set TMPDIR to "
            "another folder, which has room"
        ) from error


def _cause(error: Exception, folder: Path) -> BaseException | None:
    """The error of the system with files in a temporary folder that led to an error, if any."""
    if not folder.is_dir():  # something deleted it, or it could not be made
        return error if isinstance(error, OSError) else error.__cause__ or error.__context__
    cause, _ = system_error(error) or (None, 0)
    file = cause.filename if isinstance(cause, OSError) else None
    ours = not isinstance(file, str) or Path(file).is_relative_to(folder.parent)
    return cause if ours else None


@contextmanager
def report_faults() -> Iterator[None]:
    """Raise the first fault of a disk in this block, even if something caught it.

    Raises:
        PlaceError: there was such a fault, or the folder for temporary files has no usable name.
    """
    temporary_scratch("")
    token = faults.set([])
    try:
        yield
        check_faults()
    except Exception as error:
        if not isinstance(error, PlaceError):
            check_faults(error)
        raise
    finally:
        faults.reset(token)


def check_faults(error: Exception | None = None) -> None:
    """Raise the first fault in the block of ``report_faults``, if there was one.

    Args:
        error: the error that followed from it.

    Raises:
        PlaceError: there was such a fault.
    """
    for fault in faults.get() or ():
        raise fault from error


def temporary_scratch(kind: str) -> Scratch:
    """A folder for temporary files, which the caller makes and closes.

    Raises:
        PlaceError: the system has no folder for temporary files, or its name is not UTF-8.
    """
    try:
        folder = Path(tempfile.gettempdir())
        str(folder).encode()
    except (OSError, UnicodeEncodeError) as error:
        raise PlaceError(
            f"the folder for temporary files cannot be used ({reason(error)}); set TMPDIR to a "
            "folder that you may write to, with a name in UTF-8"
        ) from error
    return Scratch(folder / f"growkit-{kind}-")


def clear(folder: Path) -> None:
    """Delete a temporary folder as far as possible, and its lock last."""
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
    """Hold a lock in the folder of another process, to show that this process is alive.

    Raises:
        OSError: the lock cannot be created, for example because the folder is gone.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):  # the file system may lack locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def held(file: Path) -> bool:
    """Whether a live process holds a lock."""
    with free(file) as is_free:
        return not is_free and file.exists()


@contextmanager
def free(file: Path) -> Iterator[bool]:
    """Whether the process of a lock is dead; if so, this process holds the lock in the context."""
    descriptor, taken = None, False
    try:
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = True
        yield taken
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _new_lock(file: Path) -> int:
    """Create and lock a file; without locks in the file system, only create it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
