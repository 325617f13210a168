"""The files that a run reads, which it must never replace.

They may have many names (links, other letter cases, mounts), so they are identified by device and
inode.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from growkit.base.errors import InputError
from growkit.model.checkpoint.folder import MAX_ENTRIES, State, state_of, walk

Identity = tuple[int, int]
"""Device and inode."""


class Inputs:
    """Files and model folders that a run reads, in their state at its start.

    Args:
        paths: their paths; a path that does not exist is ignored.
        states: paths of further files, and of folders that are read as a whole.
    """

    def __init__(self, paths: Iterable[Path | str], states: Iterable[Path | str] = ()) -> None:
        self._named: dict[Identity, Path] = {}
        self._folders: dict[Identity, Path] = {}
        self._states: dict[Path, State] = {}
        in_full = {*map(Path, states)}
        for path in (*map(Path, paths), *in_full):
            self._add(path, path)
            in_depth = path in in_full or os.path.lexists(path / "config.json")
            inside = below(path) if in_depth else _directly_in(path)
            for entry in islice(inside, MAX_ENTRIES):
                if not (entry.is_symlink() and os.path.isdir(entry)):  # its target is not read
                    self._add(entry, path)

    def _add(self, path: Path, input_path: Path) -> None:
        state = _state(path)
        if state is None:
            return
        self._states[path] = state
        self._named.setdefault(state[:2], input_path)
        if os.path.isdir(path):
            self._folders.setdefault(state[:2], input_path)
        if path == input_path or path.is_symlink():
            for parent in _above(path):
                self._named.setdefault(parent, input_path)

    def overlap(self, path: Path) -> Path | None:
        """Find an input that is the path, is inside it or contains it, under any name."""
        match = self.around(path) or self._named.get(identity(path))
        # Replacing a folder removes the links in it, but not their targets.
        inside = (self._named.get(identity(entry, follow=False)) for entry in below(path))
        return match or next(filter(None, inside), None)

    def around(self, path: Path) -> Path | None:
        """Find the input folder that contains a path, which need not exist."""
        identities = (identity(path), *_above(path))
        return next((self._folders[key] for key in identities if key in self._folders), None)

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Refuse files that were changed or replaced while they were read.

        Args:
            paths: paths of inputs.

        Raises:
            InputError: a file was changed; the message names it.
        """
        for path in paths:
            if _state(path) is None or _state(path) != self._states.get(path):
                raise InputError(
                    f"{path} was changed while it was read, so the output was discarded; "
                    "run this again when nothing writes to it"
                )


def below(folder: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Iterate over everything in a folder, without following links.

    Args:
        folder: the folder.
        onerror: called for a folder that cannot be listed; None to ignore it.

    Raises:
        InputError: see ``walk``.
    """
    for where, folders, files in walk(folder, onerror=onerror):
        for name in (*folders, *files):
            yield where / name


def _directly_in(folder: Path) -> Iterator[Path]:
    """The entries of a folder without a config, such as one of another program."""
    with suppress(OSError, ValueError):  # a file, or a path that its reader refuses
        yield from folder.iterdir()


def _above(path: Path) -> Iterator[Identity]:
    """The folders that contain a path after links are resolved; it need not exist."""
    return (identity(parent) for parent in Path(os.path.realpath(path)).parents)


def identity(path: Path, follow: bool = True) -> Identity:
    """Identify a file or folder; (-1, -1) if it does not exist."""
    state = _state(path, follow)
    return state[:2] if state else (-1, -1)


def _state(path: Path, follow: bool = True) -> State | None:
    try:
        return state_of(path.stat() if follow else path.lstat())
    except (OSError, ValueError):
        return None
