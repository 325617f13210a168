"""Publishing: a folder gets its name only when it is complete and proved."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from growkit.checkpoint.reading import read_json
from growkit.errors import InputError

MANIFEST = "growkit.json"


def check_output(output: Path, source: Path, overwrite: bool) -> None:
    """Refuse an output that exists (unless growkit wrote it and may overwrite it) or is the source.

    Raises:
        InputError: with what to do about it.
    """
    resolved, origin = output.resolve(), source.resolve()
    if resolved == origin or resolved in origin.parents or origin in resolved.parents:
        raise InputError(f"{output} and the source {source} overlap; choose another output folder")
    if os.path.lexists(output) and not overwrite:
        raise InputError(f"{output} already exists; choose another name or pass --overwrite")
    for folder in (output, rejected_name(output)):
        if os.path.lexists(folder) and not replaceable(folder):
            raise InputError(
                f"{folder} holds what growkit did not write, or has been changed since, so it is "
                "not overwritten; move it away or choose another name"
            )


def rejected_name(output: Path) -> Path:
    """Where an output goes that broke its promise."""
    return output.with_name(f"{output.name}.rejected")


def files_of(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and time of the last change in nanoseconds of every file, by its path.

    The manifest is left out: this is recorded in it.
    """
    files = (path for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    stats = {path.relative_to(folder).as_posix(): path.lstat() for path in files}
    return {
        name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items() if name != MANIFEST
    }


def replaceable(folder: Path) -> bool:
    """Whether a folder holds nothing but what growkit wrote, as it wrote it."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    if not (folder / MANIFEST).is_file():
        return not any(folder.iterdir())
    return bool(read_json(folder / MANIFEST).get("files") == files_of(folder))


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        InputError: the file system of ``folder`` has fewer than ``needed`` bytes left.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{needed / 1e6:,.1f} MB are needed and {folder.parent} has {free / 1e6:,.1f} MB left; "
            "free some space or choose another disk"
        )


@contextmanager
def staged(output: Path, overwrite: bool) -> Iterator[Staging]:
    """A temporary folder beside ``output``, which vanishes unless it is published or set aside.

    Args:
        output: the name that the folder may get.
        overwrite: whether it may take the place of an earlier output.

    Raises:
        InputError: the folder cannot be made, or the disk is full.
    """
    missing = [path for path in output.absolute().parents if not path.exists()]
    hidden = output.absolute().parent / f".{output.name}.{secrets.token_hex(4)}"
    staging = Staging(output, hidden, overwrite)
    try:
        staging.folder.mkdir(parents=True)
        yield staging
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"the disk filled up while writing {output}; nothing was kept, free some space"
            ) from error
        raise InputError(
            f"{output} cannot be written ({error.strerror}: {error.filename}); "
            "choose a folder that you may write to"
        ) from error
    finally:
        if not staging.settled:
            shutil.rmtree(staging.folder, ignore_errors=True)
            for parent in missing:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()


class Staging:
    """The folder that is being written, and the name it may get."""

    def __init__(self, output: Path, folder: Path, overwrite: bool) -> None:
        self.folder = folder
        self.settled = False
        self._output = output
        self._overwrite = overwrite

    def publish(self) -> Path:
        """Give the folder its final name.

        Raises:
            InputError: something that may not be overwritten has taken the name meanwhile.
        """
        return self._become(self._output, self._overwrite)

    def reject(self) -> Path:
        """Set the folder aside as ``OUT.rejected``, so that what went wrong can be looked at."""
        return self._become(rejected_name(self._output), overwrite=True)

    def _become(self, final: Path, overwrite: bool) -> Path:
        previous = None
        if os.path.lexists(final):
            if not (overwrite and replaceable(final)):
                raise InputError(f"{final} has appeared meanwhile; move it away and try again")
            previous = final.rename(self.folder.with_name(f"{self.folder.name}.previous"))
        try:
            self.folder.rename(final)
        except BaseException:
            if previous:
                previous.rename(final)
            raise
        self.settled = True
        if previous:
            shutil.rmtree(previous, ignore_errors=True)
            if previous.exists():
                raise InputError(
                    f"{final} is written, but what it replaces could not be deleted; "
                    f"delete {previous}"
                )
        return final
