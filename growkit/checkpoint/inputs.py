"""Files that a run reads: none of them is ever replaced, and each stays as it was until the end.

Files and folders have many names: links, other letter cases, mounts. So they are identified by
device and inode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from growkit.base.errors import InputError
from growkit.checkpoint.folder import MOST_ENTRIES, State, state_of

Identity = tuple[int, int]
"""Device and inode."""


class Inputs:
    """Files and model folders that a run reads, as they are at its start.

    Args:
        paths: of each; those that do not exist are ignored.
        states: other files, or folders from which everything may be read.
    """

    def __init__(self, paths: Iterable[Path | str], states: Iterable[Path | str] = ()) -> None:
        self._named: dict[Identity, Path] = {}
        self._folders: dict[Identity, Path] = {}
        self._states: dict[Path, State] = {}
        whole = {*map(Path, states)}
        for path in (*map(Path, paths), *whole):
            self._add(path, path)
            # A source without a config is refused as no model folder.
            if path in whole or os.path.lexists(path / "config.json"):
                for each in islice(below(path), MOST_ENTRIES):
                    if not (each.is_symlink() and os.path.isdir(each)):  # nothing behind it is read
                        self._add(each, path)

    def _add(self, path: Path, given: Path) -> None:
        state = _state(path)
        if state is None:
            return
        self._states[path] = state
        self._named.setdefault(state[:2], given)
        if os.path.isdir(path):
            self._folders.setdefault(state[:2], given)
        if path == given or path.is_symlink():
            for identity in _above(path):
                self._named.setdefault(identity, given)

    def inside(self, folder: Path) -> Path | None:
        """A path that is read in a folder, or the folder itself."""
        return self._named.get(_identity(folder))

    def among(self, folder: Path) -> Path | None:
        """The same; also a path that is read under another name than its name in the folder."""
        found = self.inside(folder)
        # A link in there is only a name: what it leads to stays.
        others = (self._named.get(_identity(path, follow=False)) for path in below(folder))
        return found or next(filter(None, others), None)

    def around(self, path: Path) -> Path | None:
        """The folder that is read in which a path is, or would be."""
        identities = (_identity(path), *_above(path))
        return next((self._folders[each] for each in identities if each in self._folders), None)

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Refuse files that were changed or replaced while they were read.

        Args:
            paths: some of what is read.

        Raises:
            InputError: names the file.
        """
        for path in paths:
            if _state(path) is None or _state(path) != self._states.get(path):
                raise InputError(
                    f"{path} was changed while it was read, so nothing was kept; "
                    "run this again when nothing writes to it"
                )


def below(folder: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Everything in a folder; links are not followed.

    Args:
        folder: the folder.
        onerror: called for a folder that cannot be listed; None to ignore it.
    """
    for where, folders, files in os.walk(folder, onerror=onerror):
        for name in (*folders, *files):
            yield Path(where, name)


def _above(path: Path) -> Iterator[Identity]:
    """The folders in which something really is, or would be."""
    return (_identity(parent) for parent in Path(os.path.realpath(path)).parents)


def _identity(path: Path, follow: bool = True) -> Identity:
    state = _state(path, follow)
    return state[:2] if state else (-1, -1)


def _state(path: Path, follow: bool = True) -> State | None:
    try:
        return state_of(path.stat() if follow else path.lstat())
    except (OSError, ValueError):
        return None
