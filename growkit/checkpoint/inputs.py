"""What a run reads: nothing of it is ever replaced, and it stays what it was until the end.

Files and folders have many names: links, other letter cases, mounts. So they are known by what the
system calls them, device and inode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from growkit.base.errors import InputError
from growkit.checkpoint.folder import MOST_ENTRIES

Identity = tuple[int, int]
"""Device and inode."""

State = tuple[int, int, int, int, int, int]
"""Device, inode, kind, size and times: what tells files apart, and one from itself before."""


class Inputs:
    """Files and model folders that a run reads, as they are at its start.

    Args:
        paths: of each; what does not exist is passed over.
        states: of other folders of which everything may be read, or files.
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
        """What is read that lies in a folder, or is it."""
        return self._named.get(_identity(folder))

    def among(self, folder: Path) -> Path | None:
        """The same; also what is read of which some other name lies in the folder."""
        found = self.inside(folder)
        # A link in there is only a name: what it leads to stays.
        others = (self._named.get(_identity(path, follow=False)) for path in below(folder))
        return found or next(filter(None, others), None)

    def around(self, path: Path) -> Path | None:
        """The folder that is read in which a path lies, or would lie."""
        identities = (_identity(path), *_above(path))
        return next((self._folders[each] for each in identities if each in self._folders), None)

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Refuse what was changed or replaced while it was read.

        Args:
            paths: some of what is read.

        Raises:
            InputError: names it.
        """
        for path in paths:
            if _state(path) is None or _state(path) != self._states.get(path):
                raise InputError(
                    f"{path} was changed while it was read, so nothing was kept; "
                    "run this again when nobody writes to it"
                )


def below(folder: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Everything in a folder; links are not followed.

    Args:
        folder: the folder.
        onerror: called for what cannot be listed, which else is passed over.
    """
    for where, folders, files in os.walk(folder, onerror=onerror):
        for name in (*folders, *files):
            yield Path(where, name)


def _above(path: Path) -> Iterator[Identity]:
    """The folders in which something really lies, or would lie."""
    return (_identity(parent) for parent in Path(os.path.realpath(path)).parents)


def _identity(path: Path, follow: bool = True) -> Identity:
    state = _state(path, follow)
    return state[:2] if state else (-1, -1)


def _state(path: Path, follow: bool = True) -> State | None:
    try:
        return state_of(path.stat() if follow else path.lstat())
    except (OSError, ValueError):
        return None


def state_of(status: os.stat_result) -> State:
    """The state of a file, from what the system says of it."""
    return (
        *(status.st_dev, status.st_ino, status.st_mode, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )
