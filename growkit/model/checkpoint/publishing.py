"""Publication of outputs: a name is given only to a complete output.

Until an output is complete, proved and on the disk, it is ``OUT.partial-xxxxxxxx`` next to the name
``OUT``, which it gets by one rename. To replace an earlier output, the two exchange their names.
Where the system cannot do that, the earlier output is ``OUT.earlier-xxxxxxxx`` between two renames.

A killed run leaves such folders. The next run names them, and nothing but a person deletes them.

The manifest records every file of an output with its SHA-256. Outputs are replaced only while they
match this record.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, PlaceError, plain
from growkit.base.parsing import as_python_writes
from growkit.base.units import size
from growkit.model.checkpoint.folder import Folder, State, read_json, state_of
from growkit.model.checkpoint.inputs import Identity, Inputs, below, identity
from growkit.model.checkpoint.writing import flush, sha256

MANIFEST = "growkit.json"
PARTIAL, EARLIER = "partial", "earlier"
LEFT = (
    "%s was left by a run that was killed, unless one still writes it; delete it if you need "
    "nothing in it"
)

Contents = dict[str, State]
"""The state of everything in a folder, by relative path."""

_NO_CALL = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})
"""Errors of kernels, sandboxes and file systems without renameat2."""

_HERE = -100  # AT_FDCWD
_NOREPLACE, _EXCHANGE = 1, 2

_log = getLogger("growkit")


# Outputs of growkit


def write_json(file: Path, content: Any) -> None:
    """Write JSON in ASCII, so that no character in it controls a terminal or an editor."""
    of_class = file.name == "config.json"
    content = as_python_writes(content) if of_class else content
    file.write_text(json.dumps(content, indent=2, allow_nan=of_class) + "\n", encoding="ascii")


def write_manifest(folder: Path, manifest: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Write the manifest of a folder, after all its other files.

    Args:
        folder: the folder.
        manifest: the manifest without ``files`` (size in bytes and SHA-256 of every other file) and
            ``sha256`` (of the manifest without this key), which are added.
        known: the SHA-256 of some of the files, by name.
    """
    files = {
        name: [count, known.get(name) or sha256(folder / name)]
        for name, (_, _, mode, count, *_) in sorted(contents(folder).items())
        if not stat.S_ISDIR(mode)
    }
    complete = {**manifest, "files": files}
    write_json(folder / MANIFEST, {**complete, "sha256": _hash(complete)})


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if not folder.has(MANIFEST):
        raise InputError(f"{folder} has no {MANIFEST}; give the folder that growkit wrote")
    return folder.json(MANIFEST)


def own_hash(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is unchanged, by its own hash."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return bool(manifest.get("sha256") == _hash(rest))


def _hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def contents(folder: Path) -> Contents:
    """The state of everything in a folder, without following links.

    Raises:
        OSError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    paths = below(folder, onerror=refuse)
    return {path.relative_to(folder).as_posix(): state_of(path.lstat()) for path in paths}


def made_around(path: Path) -> Path | None:
    """Find the model of growkit whose folder contains a path, which need not exist.

    A manifest alone does not make a model: users keep manifests among other files, as recipes.
    """
    parents = Path(os.path.realpath(path)).parents
    parts = MANIFEST, "config.json"
    models = (parent for parent in parents if all(os.path.lexists(parent / part) for part in parts))
    return next(models, None)


def is_untouched(folder: Path) -> bool:
    """Whether a folder is empty, or holds exactly the files that growkit wrote, unchanged.

    Args:
        folder: the folder, which must not be a link.

    Raises:
        InputError: the manifest cannot be read.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    if not os.path.lexists(folder / MANIFEST):
        return not any(folder.iterdir())
    manifest = read_json(folder / MANIFEST)
    recorded = manifest.get("files")
    if not isinstance(recorded, dict) or not own_hash(manifest):
        return False
    states, device = contents(folder), folder.lstat().st_dev
    known = {stat.S_IFREG: {*recorded, MANIFEST}}
    known[stat.S_IFDIR] = {str(parent) for name in recorded for parent in Path(name).parents}
    for name, (where, _, mode, *_) in states.items():
        if where != device or name not in known.get(stat.S_IFMT(mode), ()):
            return False
    return recorded.keys() <= states.keys() and all(
        recorded[name] == [states[name][3], sha256(folder / name)] for name in recorded
    )


# Before a run


def check_output(
    output: Path, inputs: Inputs, overwrite: bool, dry_run: bool = False
) -> dict[Path, Contents]:
    """Refuse an output that overlaps an input, or exists and may not be replaced.

    Args:
        output: the requested path; a broken promise is written to ``OUT.rejected`` instead.
        inputs: files that must not be overwritten.
        overwrite: whether an earlier, unchanged output of growkit may be replaced.
        dry_run: whether nothing will be written, so that such an output does not matter yet.

    Returns:
        The folders of earlier outputs that may be replaced, with their contents.

    Raises:
        InputError: the output cannot be written; the message has the remedy.
    """
    _check_mounts(output)
    for folder in (output, rejected_name(output)):
        if read := inputs.overlap(folder):
            raise InputError(
                f"this run would write {folder} and read {read}, which overlap; "
                "choose another output folder"
            )
    if model := made_around(output):
        raise InputError(
            f"{output} would become part of {model}, which growkit wrote; choose another name"
        )
    _check_makeable(output)
    if os.path.lexists(output) and not overwrite:
        # A cheap check: only --overwrite hashes every file.
        ours = output.is_dir() and not output.is_symlink()
        ours = ours and (os.path.lexists(output / MANIFEST) or not any(output.iterdir()))
        if ours and dry_run:
            return {}
        more = ", or overwrite it (--overwrite, in Python overwrite=True)" if ours else ""
        raise InputError(f"{output} already exists; choose another name{more}")
    replaceable = {}
    for folder in filter(os.path.lexists, (output, rejected_name(output))):
        # Listed before its files are hashed, so that a change during the hashing is noticed later.
        replaceable[folder] = contents(folder) if os.path.lexists(folder / MANIFEST) else {}
        if not is_untouched(folder):
            raise InputError(
                f"{folder} holds files that growkit did not write, or that were changed since, so "
                "it is not overwritten; move it away or choose another name"
            )
        sound = any(folder.iterdir()) and read_json(folder / MANIFEST).get("kept") is not False
        if folder != output and sound:
            raise InputError(
                f"{folder} is not a rejected model, but would be replaced if {output} were "
                "rejected; move it away or choose another name"
            )
    return replaceable


def _check_mounts(output: Path) -> None:
    """Refuse a folder that cannot be renamed, since something is mounted there.

    Raises:
        InputError: the message names a folder that can.
    """
    for folder in (output, rejected_name(output)):
        if _is_mount(folder):
            raise InputError(
                f"{folder} is a mount point, which no finished output can replace; name a folder "
                f"inside it, such as {output / 'model'}"
            )


def _is_mount(path: Path) -> bool:
    """Whether something is mounted at a path, also a folder of the same file system."""
    mounts: list[bytes] = []
    with suppress(OSError):  # Linux alone lists them like this
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        mounts = [line.split()[4] for line in lines]
    # Spaces and backslashes of names are octal numbers there.
    names = (re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), m) for m in mounts)
    return os.path.ismount(path) or os.fsencode(os.path.realpath(path)) in names


def _check_makeable(output: Path) -> None:
    """Test whether a folder can be created next to ``output``, without creating one."""
    parent = next(folder for folder in output.parents if os.path.lexists(folder))
    with writing(output):
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            code = errno.EACCES if parent.is_dir() else errno.ENOTDIR
            raise OSError(code, os.strerror(code), str(parent))
        with suppress(FileNotFoundError):  # any other error means that the name is too long
            os.lstat(beside(output))


def rejected_name(output: Path) -> Path:
    """The path for an output that breaks its promise.

    Raises:
        InputError: the output is the root folder.
    """
    if not output.name:
        raise InputError(f"{output} is the root folder; name a folder to create")
    return output.with_name(f"{output.name}.rejected")


def check_space(folder: Path, needed: int) -> None:
    """Refuse an output that is too large for the disk.

    Raises:
        PlaceError: the file system of ``folder`` has fewer than ``needed`` bytes left.
    """
    available = shutil.disk_usage(folder).free
    if available < needed:
        raise PlaceError(
            f"{size(needed)} are needed and {folder.parent} has {size(available)} left; "
            "free some space or choose another disk"
        )


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn errors in this block into errors of writing the output.

    Raises:
        PlaceError: instead of an ``OSError``; the message has the cause.
    """
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        why, remedy = f"({error.strerror}{where})", "choose a folder that you may write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, remedy = "since the disk filled up", "free some space"
        elif error.errno == errno.ENAMETOOLONG:
            why, remedy = "since its name is too long", "choose a shorter one"
        raise PlaceError(f"{output} cannot be written {why}; {remedy}") from error


# A run


def beside(path: Path, kind: str = PARTIAL) -> Path:
    """A new name next to a path: ``kind`` is ``partial`` or ``earlier``."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(4)}")


def report_left(path: Path) -> None:
    """Name what runs left next to a path."""
    name = re.compile(rf"{re.escape(path.name)}\.({PARTIAL}|{EARLIER})-[0-9a-f]{{8}}")
    with suppress(OSError):
        for left in filter(name.fullmatch, sorted(os.listdir(path.parent))):
            _log.warning(LEFT, plain(str(path.parent / left)))


class Staging:
    """The folder of an output that is being written.

    Args:
        output: the requested path.
        replaceable: earlier outputs that may be replaced; see ``check_output``.
    """

    def __init__(self, output: Path, replaceable: Mapping[Path, Contents]) -> None:
        self.folder, self._earlier = beside(output), beside(output, EARLIER)
        self._output, self._replaceable = output, replaceable
        self._identity: Identity | None = None
        self._final: Path | None = None

    def make(self) -> None:
        """Create the folder."""
        self.folder.mkdir()
        self._identity = identity(self.folder)

    @property
    def final(self) -> Path | None:
        """The path under which the folder was published; None if it was not."""
        names = (self._output, rejected_name(self._output))
        published = (name for name in names if identity(name, False) == self._identity)
        return self._final or next(published, None)

    def publish(self, *, rejected: bool = False) -> Path:
        """Give the folder its final name.

        Args:
            rejected: whether the name is ``OUT.rejected``, since the output breaks its promise.

        Raises:
            InputError: in the meantime the name was taken by files that may not be replaced.
        """
        final = rejected_name(self._output) if rejected else self._output
        with writing(final):
            for name in sorted(contents(self.folder), reverse=True):  # data before names
                flush(self.folder / name)
            flush(self.folder)
            try:
                if os.path.lexists(final):
                    self._replace(final)
                else:
                    move(self.folder, final)
                    self._final = final
            except FileExistsError:
                raise _appeared(final) from None
            except OSError:
                if self.final is None:
                    raise
        try:
            flush(final.parent)
        except OSError as error:
            raise InputError(
                f"{final} is written, but the disk did not confirm that it will stay "
                f"({error.strerror}); check the disk"
            ) from error
        return final

    def _replace(self, final: Path) -> None:
        """Exchange the names of the folder and an earlier output."""
        expected = self._replaceable.get(final)
        if expected is None or contents(final) != expected:
            raise _appeared(final)
        self._exchange(final)
        self._final = final
        if contents(self.folder) != expected:
            self._exchange(final)
            self._final = None
            raise _appeared(final)

    def _exchange(self, final: Path) -> None:
        if _renameat2(self.folder, final, _EXCHANGE):  # in one step
            return
        os.rename(final, self._earlier)
        try:
            move(self.folder, final)
        except BaseException:
            if not os.path.lexists(final):
                move(self._earlier, final)
            raise
        with suppress(OSError):
            os.rename(self._earlier, self.folder)

    def close(self) -> None:
        """Delete an output that was not published, or the one that it replaced."""
        final = self.final
        for folder in filter(os.path.lexists, (self.folder, self._earlier)):
            with suppress(OSError):
                ours = identity(folder, False) == self._identity
                replaced = final and contents(folder) == self._replaceable.get(final)
                (shutil.rmtree if ours or replaced else os.rmdir)(folder)


@contextmanager
def staged(output: Path, replaceable: Mapping[Path, Contents]) -> Iterator[Staging]:
    """Create a temporary folder next to ``output``, which is deleted unless it is published.

    Args:
        output: the requested path.
        replaceable: earlier outputs that may be replaced; see ``check_output``.

    Raises:
        InputError: the folder cannot be created.
    """
    missing = [path for path in output.parents if not path.exists()]
    staging = Staging(output, replaceable)
    try:
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            staging.make()
        yield staging
    except KeyboardInterrupt:
        if staging.final:
            raise KeyboardInterrupt(f"{staging.final} is written") from None
        raise
    finally:
        try:
            staging.close()
        except BaseException:  # an interrupt; the next one is ignored
            staging.close()
            raise
        finally:
            report_left(output)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def _appeared(final: Path) -> InputError:
    return InputError(f"{final} appeared or changed in the meantime; move it away and try again")


# The file system


def move(source: Path, target: Path) -> None:
    """Rename a file or folder to a free name.

    Raises:
        FileExistsError: the name is taken.
    """
    if not _renameat2(source, target, _NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call renameat2, see rename(2); False if the system or the file system does not have it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_CALL:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
