"""Publishing: a folder gets its name only when it is complete, proved and on the disk.

Beside the output ``.OUT.xxxxxxxx`` holds it until then, as ``new``. To replace an earlier output
the two exchange their names in one step. Where that cannot be done, the earlier one is put beside
the new one first, as ``old.OUT``, and whoever comes next finishes what was begun (``tidy``).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path

from growkit.base.errors import InputError, PlaceError, plain
from growkit.base.units import size
from growkit.checkpoint.atomic import atomic_swap, flush, flush_tree, move
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.made import MANIFEST as MANIFEST
from growkit.checkpoint.made import Contents, contents, is_untouched, made_around, remove
from growkit.checkpoint.reading import read_json
from growkit.checkpoint.scratch import Scratch, clear, noted

NEW, OLD = "new", "old."

_log = getLogger("growkit")


def check_output(output: Path, inputs: Inputs, overwrite: bool) -> dict[Path, Contents]:
    """Refuse an output that is read, or exists (unless growkit wrote it and may overwrite it).

    Args:
        output: the name that is asked for; if the promise is broken, ``OUT.rejected`` is used.
        inputs: files that must not be overwritten.
        overwrite: whether an earlier output may be replaced.

    Returns:
        What holds an earlier output that may be replaced, and what is in there.

    Raises:
        InputError: with what to do about it.
    """
    for folder in (output, rejected_name(output)):
        _check_apart(folder, inputs.inside(folder) or inputs.around(folder))
    if model := made_around(output):
        raise InputError(
            f"{output} would become part of {model}, which growkit wrote; choose another name"
        )
    _check_makeable(output)
    if os.path.lexists(output) and not overwrite:
        # The look at every file is left to those who ask for it.
        replaced = output.is_dir() and not output.is_symlink()
        replaced = replaced and (os.path.lexists(output / MANIFEST) or not any(output.iterdir()))
        more = ", or overwrite it (--overwrite, in Python overwrite=True)" if replaced else ""
        raise InputError(f"{output} already exists; choose another name{more}")
    found = {}
    for folder in (output, rejected_name(output)):
        if os.path.lexists(folder):
            # Before the look at its files: nothing that changes during the look is overlooked.
            before = contents(folder) if os.path.lexists(folder / MANIFEST) else {}
            if not is_untouched(folder):
                raise InputError(
                    f"{folder} holds what growkit did not write, or has been changed since, so it "
                    "is not overwritten; move it away or choose another name"
                )
            if folder != output and not _is_rejected(folder):
                raise InputError(
                    f"{folder} broke no promise, and would be replaced if {output} did; "
                    "move it away or choose another name"
                )
            _check_apart(folder, inputs.among(folder))
            found[folder] = before
    return found


def _check_makeable(output: Path) -> None:
    """Find out whether a folder can be made beside ``output``, without making one."""
    parent = next(each for each in output.parents if os.path.lexists(each))
    with writing(output):
        try:
            os.lstat(Scratch(output.with_name(f".{output.name}.")).path)
        except FileNotFoundError:
            pass
        except OSError as error:  # its name is too long, say
            raise OSError(error.errno, error.strerror) from None
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


def _check_apart(folder: Path, read: Path | None) -> None:
    if read is not None:
        raise InputError(
            f"this run would write {folder} and read {read}, which overlap; "
            "choose another output folder"
        )


def _is_rejected(folder: Path) -> bool:
    """Whether an output broke its promise: others are not replaced unless that is asked for."""
    return not any(folder.iterdir()) or read_json(folder / MANIFEST).get("kept") is False


def rejected_name(output: Path) -> Path:
    """Where an output goes that broke its promise.

    Raises:
        InputError: the output has no name.
    """
    if not output.name:
        raise InputError(f"{output} is the root of all folders; name a folder to be made")
    return output.with_name(f"{output.name}.rejected")


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        PlaceError: the file system of ``folder`` has fewer than ``needed`` bytes left.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PlaceError(
            f"{size(needed)} are needed and {folder.parents[1]} has {size(free)} left; "
            "free some space or choose another disk"
        )


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """What goes wrong in here is that the output cannot be written.

    Raises:
        PlaceError: says why, in place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PlaceError(
                f"the disk filled up while writing {output}; free some space"
            ) from error
        if error.errno == errno.ENAMETOOLONG:
            raise PlaceError(
                f"{output} cannot be written, since its name is too long; choose a shorter one"
            ) from error
        where = f": {error.filename}" if error.filename else ""
        raise PlaceError(
            f"{output} cannot be written ({error.strerror}{where}); "
            "choose a folder that you may write to"
        ) from error


def write_whole(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file.

    Args:
        path: its name; if there is another file of this name, it is replaced.
        text: what it shall hold; names that are no Unicode are escaped.
        new: whether the name must be free.

    Raises:
        InputError: it cannot be written, or the name is not free; names it.
    """
    scratch = Scratch(path.with_name(f".{path.name}."))
    try:
        with writing(path):
            scratch.make()
            written = scratch.path / path.name
            written.write_bytes(text.encode("utf-8", "backslashreplace"))
            flush(written)
            if new:
                move(written, path)
            else:
                os.replace(written, path)
            flush(path.parent)
    finally:
        scratch.close()


@contextmanager
def staged(output: Path, replaceable: Mapping[Path, Contents]) -> Iterator[Staging]:
    """A temporary folder beside ``output``, which vanishes unless it is published or set aside.

    Args:
        output: the name that the folder may get.
        replaceable: earlier outputs whose place it may take; see ``check_output``.

    Raises:
        InputError: the folder cannot be made.
    """
    missing = [path for path in output.parents if not path.exists()]
    scratch, staging = Scratch(output.with_name(f".{output.name}.")), None
    try:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            scratch.make()
            staging = Staging(output, scratch, replaceable)
        yield staging
    except KeyboardInterrupt:
        final = staging and staging.final
        if final:
            raise KeyboardInterrupt(f"{final} is written") from None
        raise
    finally:
        try:
            stays = tidy(scratch.path, replaceable.values())
        except BaseException:  # an interrupt; the next one is ignored
            stays = tidy(scratch.path, replaceable.values())
            raise
        finally:
            scratch.release()
        for path in stays:
            _log.warning("%s is left; keep what you need of it, and delete it", plain(str(path)))
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


class Staging:
    """The folder that is being written, and the name it may get."""

    def __init__(
        self, output: Path, scratch: Scratch, replaceable: Mapping[Path, Contents]
    ) -> None:
        self.folder = scratch.path / NEW
        self._output = output
        self._replaceable = replaceable
        self._named: Path | None = None
        self.folder.mkdir()
        self._inode = _inode(self.folder)
        scratch.note(self._inode)

    @property
    def final(self) -> Path | None:
        """The name that the folder has got; None if it has none yet."""
        if self._named:
            return self._named
        # An interrupt may come between the act and the note of it.
        names = (self._output, rejected_name(self._output))
        return next((name for name in names if _inode(name) == self._inode), None)

    def publish(self) -> Path:
        """Give the folder its final name.

        Raises:
            InputError: something that may not be overwritten has taken the name meanwhile.
        """
        return self._become(self._output)

    def reject(self) -> Path:
        """Set the folder aside as ``OUT.rejected``, so that what went wrong can be looked at."""
        return self._become(rejected_name(self._output))

    def _become(self, final: Path) -> Path:
        with writing(final):
            flush_tree(self.folder.parent)
            try:
                if os.path.lexists(final):
                    self._replace(final)
                else:
                    move(self.folder, final)
                self._named = final
            except FileExistsError:
                raise _appeared(final) from None
            except OSError:
                tidy(self.folder.parent, self._replaceable.values())
                if self.final is None:
                    raise
        try:
            flush(final.parent)
        except OSError as error:
            raise InputError(
                f"{final} is written, but the disk does not say whether it will stay there "
                f"({error.strerror}); look after the disk"
            ) from error
        return final

    def _replace(self, final: Path) -> None:
        """Take the place of an earlier output, which is then in the hidden folder."""
        expected = self._replaceable.get(final)
        if expected is None or contents(final) != expected:
            raise _appeared(final)
        if atomic_swap(self.folder, final):
            self._named = final
            if contents(self.folder) != expected:
                atomic_swap(self.folder, final)
                self._named = None
                raise _appeared(final)
            return
        old = self.folder.with_name(f"{OLD}{final.name}")
        os.rename(final, old)
        if contents(old) != expected:
            move(old, final)
            raise _appeared(final)
        flush(old.parent)
        move(self.folder, final)


def tidy(scratch: Path, known: Collection[Contents] = ()) -> list[Path]:
    """End what a run has begun beside its output, and delete what is left of it.

    Args:
        scratch: the folder ``.OUT.xxxxxxxx`` of this run, or of one that is dead.
        known: what is in earlier outputs that may be deleted; others are looked at.

    Returns:
        Earlier outputs that stay, since they cannot be deleted or somebody has changed them.
    """
    stays = []
    try:
        own = noted(scratch)  # without it nothing was begun, and nothing can be an earlier output
        for old in scratch.glob(f"{OLD}*"):
            _finish(scratch / NEW, old, scratch.with_name(old.name.removeprefix(OLD)))
        unpublished = _inode(scratch / NEW) == own
        for path in scratch.iterdir():
            earlier = own and path.is_dir() and _inode(path) != own
            if earlier and (unpublished or not _removed(path, known)):
                stays.append(path)
    except OSError:
        return [scratch] if os.path.lexists(scratch) else []
    if not stays:
        clear(scratch)
    return stays


def _finish(new: Path, old: Path, final: Path) -> None:
    """Replace an output that lost its name already; if that cannot be, it has its name again."""
    if os.path.lexists(final) or not new.is_dir():
        return
    try:
        move(new, final)
    except OSError:
        move(old, final)
    flush(final.parent)


def _removed(earlier: Path, known: Collection[Contents]) -> bool:
    """Delete an earlier output, unless somebody has changed it; gives whether it is gone."""
    with suppress(OSError, InputError):
        if contents(earlier) in known or is_untouched(earlier, partly=True):
            remove(earlier)
    return not os.path.lexists(earlier)


def _inode(path: Path) -> str:
    try:
        return str(path.lstat().st_ino)
    except OSError:
        return ""


def _appeared(final: Path) -> InputError:
    return InputError(f"{final} has appeared or changed meanwhile; move it away and try again")
