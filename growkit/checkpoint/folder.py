"""A model folder, opened once: how growkit reads untrusted folders.

Every file of a source or a target is found and opened here (``docs/trust.md``). A name leads to a
regular file inside the folder, or inside the blobs of the cache that the folder belongs to, or the
folder is refused: links to anywhere else, named pipes and devices are never opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from growkit.base.errors import InputError, reason
from growkit.base.parsing import parse_json, parse_yaml
from growkit.base.units import size
from growkit.checkpoint.model_files import matches, no_folder, no_model

MOST_BYTES = 1 << 28
"""Size of a file, at most, that is read as a whole; weights are not."""

MOST_JSON = 1 << 26
"""The same of JSON, which takes more memory than its file."""

MOST_YAML = 1 << 17
"""The same of YAML, which takes long to parse."""

MOST_ENTRIES = 100_000
"""Files and folders, at most, that a model folder holds."""

BLOCK = 1 << 20
"""Bytes that are copied at a time."""

State = tuple[int, int, int, int, int, int]
"""Device, inode, kind, size and times: these tell files apart, and one from itself before."""


class Folder:
    """A model folder.

    Args:
        path: where it is; a link to a folder is followed once, here.

    Raises:
        InputError: there is no folder.
    """

    def __init__(self, path: Path | str) -> None:
        check_name(path)
        self.path = Path(path)
        try:
            is_folder = self.path.is_dir()
        except OSError:  # its name is too long, say
            is_folder = False
        if not is_folder:
            raise InputError(no_folder(self.path))
        self._inside = [self.path.resolve()]
        snapshots = self._inside[0].parent
        if snapshots.name == "snapshots":  # of a hub cache: the files are links into its blobs
            self._inside.append(snapshots.parent / "blobs")

    def __str__(self) -> str:
        return str(self.path)

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, usable or not."""
        return os.path.lexists(self.path / name)

    def find(self, name: str) -> Path | None:
        """The path of a regular file, by its name relative to the folder; None if there is none.

        Raises:
            InputError: what has this name is a folder, a pipe or a device, or a link that leads
                nowhere or out of the folder.
        """
        check_name(name)
        path = self.path / name
        if not os.path.lexists(path):
            return None
        try:
            real = path.resolve(strict=True)
            mode = real.stat().st_mode
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{path} is a link that leads nowhere ({reason(error)}); copy the file itself there"
            ) from None
        if not any(real.is_relative_to(inside) for inside in self._inside):
            raise InputError(
                f"{path} leads out of the folder, to {real}; copy the file itself there"
            )
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
        return path

    def require(self, name: str) -> Path:
        """As ``find``.

        Raises:
            InputError: there is no such file either.
        """
        path = self.find(name)
        if path is None:
            if name == "config.json":
                raise InputError(no_model(self.path))
            raise InputError(f"{self.path / name} does not exist; is {self.path} a model folder?")
        return path

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        """A regular file, to be read; see ``require``."""
        with open_regular(self.require(name)) as stream:
            yield stream

    def bytes(self, name: str, most: int = MOST_BYTES) -> bytes:
        """The contents of a file of at most that many bytes.

        Raises:
            InputError: see ``require``; or it is larger, or cannot be read.
        """
        with self.open(name) as stream:
            content = read(stream, most + 1, self.path / name)
        _check_size(self.path / name, len(content), most)
        return content

    def check_small(self, name: str) -> None:
        """Refuse a file that is larger than one that is read as a whole can be; see ``require``."""
        _check_size(self.path / name, self.require(name).stat().st_size, MOST_BYTES)

    def copy(self, name: str, target: Path) -> None:
        """Copy a file into another folder, block by block; see ``open``."""
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as stream, (target / name).open("xb") as copied:
            while block := read(stream, BLOCK, self.path / name):
                copied.write(block)

    def json(self, name: str, digits: int = 100) -> dict[str, Any]:
        """A JSON object.

        Args:
            name: of the file.
            digits: of a whole number in it, at most.

        Raises:
            InputError: see ``bytes``; or it is not a JSON object, see ``parse_json``.
        """
        content = self.bytes(name, MOST_JSON)
        try:
            parsed = parse_json(content, digits)
        except ValueError as error:
            raise InputError(
                f"{self.path / name} cannot be read as JSON ({reason(error)}); copy it again"
            ) from None
        if not isinstance(parsed, dict):
            raise InputError(
                f"{self.path / name} holds a JSON {type(parsed).__name__}; an object was expected"
            )
        return parsed

    def names(self, *patterns: str) -> list[str]:
        """Everything in the folder that is no folder itself, relative to it.

        Links are not followed: one to a folder is listed, what is behind it is not.

        Args:
            *patterns: only files and folders at the top that match one of these, with contents.

        Raises:
            InputError: there are more than ``MOST_ENTRIES``, or a folder cannot be read.
        """

        def stop(error: OSError) -> None:
            raise _unreadable(Path(error.filename), error)

        found: list[str] = []
        for where, folders, files in os.walk(self.path, onerror=stop):
            at = Path(where)
            if at == self.path and patterns:
                folders[:] = [name for name in folders if matches(name, patterns)]
                files = [name for name in files if matches(name, patterns)]
            links = [name for name in folders if (at / name).is_symlink()]
            found += [(at / name).relative_to(self.path).as_posix() for name in (*links, *files)]
            if len(found) > MOST_ENTRIES:
                raise InputError(
                    f"{self.path} holds more than {MOST_ENTRIES:,} files; give a model folder"
                )
        return sorted(found)


def check_name(path: Path | str) -> None:
    """Refuse a path that cannot be written down in a manifest.

    Raises:
        InputError: it is empty, or has what UTF-8 or the system has no place for.
    """
    text = str(path)
    if not text or "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{text!r} is no name of a file or folder; give one in UTF-8")


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file, to be read; nothing is waited for, as behind a pipe.

    Raises:
        InputError: it cannot be opened, or is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, mode)
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; see ``Folder.json``."""
    return Folder(file.parent).json(file.name)


def state_of(status: os.stat_result) -> State:
    """The state of a file, from its status."""
    return (
        *(status.st_dev, status.st_ino, status.st_mode, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def _check_size(path: Path, count: int, most: int) -> None:
    if count > most:
        raise InputError(
            f"{path} is larger than {size(most)}; a file of this kind should be small, "
            "copy it again"
        )


def read(stream: IO[bytes], count: int, path: Path | str) -> bytes:
    """As many bytes, at most.

    Raises:
        InputError: they cannot be read.
    """
    try:
        return stream.read(count)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_yaml(file: Path, kind: str) -> Any:
    """The value of a YAML file.

    Args:
        file: where it is.
        kind: its name in messages.

    Raises:
        InputError: it cannot be read, or is not the YAML that growkit takes.
    """
    try:
        with open_regular(file) as stream:
            text = read(stream, MOST_YAML + 1, file).decode("utf-8")
        if len(text) > MOST_YAML:
            raise InputError(f"{file} is larger than {size(MOST_YAML)}; give a smaller one")
        return parse_yaml(text)
    except InputError as error:  # which names the file
        raise InputError(f"{kind} {error}") from None
    except ValueError as error:
        raise InputError(f"{kind} {file} cannot be used: {reason(error)}") from None


def _irregular(path: Path, mode: int) -> InputError:
    if stat.S_ISDIR(mode):
        return InputError(
            f"{path} is a folder, and a file was expected; have the file in its place"
        )
    return InputError(f"{path} is no regular file; replace it by one")


def _unreadable(path: Path | str, error: OSError | ValueError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path} cannot be read (there is no such file); check its name")
    why = error.strerror if isinstance(error, OSError) else error
    return InputError(f"{path} cannot be read ({why}); check its name, and make it readable")
