"""Temporary folders, which outlive their run only if it is killed.

A fault of the disk with these folders says nothing about a model, and ends the run.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from growkit.base.errors import PlaceError, called, faults, reason, system_error

T = TypeVar("T")

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
        kind: what it holds, a part of its name; see ``STANDS_FOR``.

    Raises:
        PlaceError: the system has no folder for temporary files, or its name is not UTF-8.
    """

    def __init__(self, kind: str) -> None:
        try:
            folder = Path(tempfile.gettempdir())
            str(folder).encode()
        except (OSError, UnicodeEncodeError) as error:
            raise PlaceError(
                f"the folder for temporary files cannot be used ({reason(error)}); set TMPDIR to a "
                "folder that you may write to, with a name in UTF-8"
            ) from error
        self.path = folder / f"growkit-{kind}-{secrets.token_hex(8)}"

    def make(self) -> None:
        """Create the folder, if it does not exist.

        Raises:
            OSError: the folder cannot be created.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """Create a folder for temporary files, which the end of the context deletes.

    Raises:
        PlaceError: the disk is full, or has another fault.
    """
    scratch = Scratch(kind)
    try:
        with using(scratch):
            scratch.make()
            with called(scratch.path, STANDS_FOR.get(kind, "a temporary folder")):
                yield scratch.path
    finally:
        scratch.close()


def in_temporary(
    kind: str, use: Callable[[Path], T], expected: Callable[[T], bool] = lambda result: True
) -> T:
    """Use a folder for temporary files, and another one if that fails.

    Libraries hide some faults of a disk: for ``os.path.isfile``, a file that cannot be looked up is
    a missing one. What is wrong with a model fails in both folders.

    Args:
        kind: see ``temporary``.
        use: gets the folder.
        expected: whether a result shows no fault.

    Raises:
        PlaceError: see ``temporary``.
        Exception: any exception of ``use`` in the second folder.
    """
    try:
        with temporary(kind) as folder:
            result = use(folder)
        if expected(result):
            return result
    except Exception as error:  # the second folder shows whether it was by chance
        if isinstance(error, PlaceError):
            raise
    with temporary(kind) as folder:
        return use(folder)


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
    unopened = isinstance(error, FileNotFoundError) and error.errno is None  # by safetensors
    if unopened or not os.path.isdir(folder):  # something deleted it, or it could not be made
        return error
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
    Scratch("")
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
