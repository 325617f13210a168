"""Folders for work in progress, which are removed however their run ends.

Such a folder has a file that is locked as long as its run
lives: the system releases the lock when the run ends, however it ends. So a folder whose lock is
free was left by a killed run.
"""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from growkit.base.errors import InputError, reason

LOCK = "growkit.lock"
ENDING = 8
"""Characters at the end of the name of such a folder that are random."""

NAMES = rf"(\..+\.|growkit-[a-z]+-)[0-9a-f]{{{ENDING}}}"
"""Names of such folders, next to an output or among temporary files."""

MODE = 0o700
"""Permissions of such a folder."""

_NO_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})
"""Errors of file systems that cannot flush folders."""


class Scratch:
    """A folder with a name of its own.

    It is made by ``make``, not at once: an interrupt may come at any moment, and the cleaning up
    needs to know the folder by then.

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
            with suppress(FileExistsError):
                self.path.mkdir(mode=MODE)
                # Another run may take the folder for a dead one until it is locked.
                with suppress(FileNotFoundError):
                    self._lock = _new_lock(self.path / LOCK)
                    if os.fstat(self._lock).st_nlink:
                        return
                    self.release()
            self.path = self._any_path()

    def close(self) -> None:
        """Delete the folder."""
        clear(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock of what is left of the folder."""
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
            raise InputError(
                f"{scratch.path.parent} cannot take temporary files ({reason(error)}); set TMPDIR "
                "to a folder that has room"
            ) from error
        raise
    finally:
        scratch.close()


def temporary_scratch(kind: str) -> Scratch:
    """A folder for temporary files, to be made and closed."""
    return Scratch(Path(tempfile.gettempdir()) / f"growkit-{kind}-")


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
    """A lock in a folder of another process, which shows that process that this one lives.

    Raises:
        OSError: it cannot be made: the folder is gone, for example.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):  # of file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def held(file: Path) -> bool:
    """Whether a process that lives holds such a lock."""
    with free(file) as is_free:
        return not is_free and file.exists()


@contextmanager
def free(file: Path) -> Iterator[bool]:
    """Whether there is a lock whose process is dead; it is then held by this one meanwhile."""
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
    """A new file that is locked, if the file system has locks."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


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
