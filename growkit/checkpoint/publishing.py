"""Folders in the making: work in progress vanishes with its run, outputs get a name when complete.

A folder for work in progress has a file that is locked as long as its run lives: the system
releases the lock when the run ends, however it ends. So a folder whose lock is free was left by a
killed run.

An output gets its name only when it is complete, proved and on the disk. Until then it is ``new``
in the folder ``.OUT.xxxxxxxx`` next to it. To replace an earlier output the two exchange their
names in one step. Where that cannot be done, the earlier one is first put next to the new one, as
``old.OUT``, and the next run finishes what was begun (``tidy``).

Every file of an output is recorded in its manifest, with its SHA-256. Only what is as it was
recorded is ever replaced or deleted, one recorded name after the other. Files that a run reads are
never replaced. They have many names (links, other letter cases, mounts), so they are identified by
device and inode.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, PlaceError, plain, reason
from growkit.base.units import size
from growkit.checkpoint.folder import MOST_ENTRIES, State, read_json, state_of
from growkit.checkpoint.writing import flush, sha256

MANIFEST, LOCK = "growkit.json", "growkit.lock"
ENDING = 8
"""Characters at the end of the name of a folder for work in progress that are random."""

NAMES = rf"(\..+\.|growkit-[a-z]+-)[0-9a-f]{{{ENDING}}}"
"""Names of such folders, next to an output or among temporary files."""

MODE = 0o700
"""Permissions of such a folder."""

NEW, OLD = "new", "old."
LEFT = "%s is left of a run; keep what you need of it, and delete it"

Contents = dict[str, State]
"""The state of everything in a folder, by its path in it."""

Identity = tuple[int, int]
"""Device and inode."""

_NO_CALL = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})
"""Errors of kernels, sandboxes and file systems that do not know renameat2."""

_HERE = -100  # AT_FDCWD
_NOREPLACE, _EXCHANGE = 1, 2

_log = getLogger("growkit")


# Work in progress


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


# What a run reads


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

    def overlap(self, path: Path) -> Path | None:
        """What is read and is a file or folder, in it, or around it; also by another name."""
        found = self.around(path) or self._named.get(_identity(path))
        # A link in there is only a name: what it leads to stays.
        others = (self._named.get(_identity(each, follow=False)) for each in below(path))
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


# What growkit made


def write_json(file: Path, content: Any) -> None:
    """Write JSON; names that are no Unicode are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    file.write_bytes(text.encode("utf-8", "backslashreplace"))


def write_manifest(folder: Path, manifest: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Write the manifest of a folder in which everything else is written.

    Args:
        folder: the folder.
        manifest: everything in it but ``files`` (size in bytes and SHA-256 of every other file) and
            ``sha256`` (of itself, as it would be without this key).
        known: the SHA-256 of some of the files.
    """
    files = {
        name: [count, known.get(name) or sha256(folder / name)]
        for name, (_, _, mode, count, *_) in sorted(contents(folder).items())
        if not stat.S_ISDIR(mode)
    }
    complete = {**manifest, "files": files}
    unnamed = folder / f".{MANIFEST}"  # what has a manifest is complete
    write_json(unnamed, {**complete, "sha256": _hash(complete)})
    unnamed.rename(folder / MANIFEST)


def own_hash(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is as it was written."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return bool(manifest.get("sha256") == _hash(rest))


def _hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def contents(folder: Path) -> Contents:
    """Everything in a folder; links are not followed.

    Raises:
        OSError: some of it cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = below(folder, onerror=refuse)
    return {path.relative_to(folder).as_posix(): state_of(path.lstat()) for path in found}


def made_around(path: Path) -> Path | None:
    """The model that growkit wrote in whose folder something is, or would be.

    A manifest alone makes no model: users keep one as the recipe that it is, among other files.
    """
    parents = Path(os.path.realpath(path)).parents
    parts = MANIFEST, "config.json"
    found = (each for each in parents if all(os.path.lexists(each / part) for part in parts))
    return next(found, None)


def is_untouched(folder: Path, *, partly: bool = False) -> bool:
    """Whether a folder holds nothing but what growkit wrote, as it wrote it; or nothing at all.

    Args:
        folder: the folder; a link to one is none.
        partly: whether some of it may be missing.

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
    found, device = contents(folder), folder.lstat().st_dev
    known = {stat.S_IFREG: {*recorded, MANIFEST}}
    known[stat.S_IFDIR] = {str(parent) for name in recorded for parent in Path(name).parents}
    for name, (where, _, mode, *_) in found.items():
        if where != device or name not in known.get(stat.S_IFMT(mode), ()):
            return False
    files = [name for name in recorded if name in found]
    return (partly or len(files) == len(recorded)) and all(
        recorded[name] == [found[name][3], sha256(folder / name)] for name in files
    )


# Before a run


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
        # Only --overwrite needs a look at every file.
        replaced = output.is_dir() and not output.is_symlink()
        replaced = replaced and (os.path.lexists(output / MANIFEST) or not any(output.iterdir()))
        more = ", or overwrite it (--overwrite, in Python overwrite=True)" if replaced else ""
        raise InputError(f"{output} already exists; choose another name{more}")
    found = {}
    for folder in filter(os.path.lexists, (output, rejected_name(output))):
        # Before the look at its files: nothing that changes during the look is overlooked.
        found[folder] = contents(folder) if os.path.lexists(folder / MANIFEST) else {}
        if not is_untouched(folder):
            raise InputError(
                f"{folder} holds what growkit did not write, or has been changed since, so it "
                "is not overwritten; move it away or choose another name"
            )
        sound = any(folder.iterdir()) and read_json(folder / MANIFEST).get("kept") is not False
        if folder != output and sound:
            raise InputError(
                f"{folder} broke no promise, and would be replaced if {output} did; "
                "move it away or choose another name"
            )
    return found


def _check_makeable(output: Path) -> None:
    """Find out whether a folder can be made next to ``output``, without making one."""
    parent = next(each for each in output.parents if os.path.lexists(each))
    with writing(output):
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))
        with suppress(FileNotFoundError):  # another error: its name is too long
            os.lstat(Scratch(output.with_name(f".{output.name}.")).path)


def rejected_name(output: Path) -> Path:
    """The name of an output that broke its promise.

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
    available = shutil.disk_usage(folder).free
    if available < needed:
        raise PlaceError(
            f"{size(needed)} are needed and {folder.parents[1]} has {size(available)} left; "
            "free some space or choose another disk"
        )


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Report errors in here as errors of writing the output.

    Raises:
        PlaceError: gives the cause, in the place of an ``OSError``.
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


def write_whole(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file.

    Args:
        path: its name; if there is another file of this name, it is replaced.
        text: its contents; names that are no Unicode are escaped.
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
            (move if new else os.replace)(written, path)
            flush(path.parent)
    finally:
        scratch.close()


class Staging:
    """The folder that is being written, and the name it may get."""

    def __init__(self, output: Path, replaceable: Mapping[Path, Contents]) -> None:
        self.scratch = Scratch(output.with_name(f".{output.name}."))
        self._output, self._replaceable = output, replaceable
        self._identity: Identity | None = None

    def make(self) -> None:
        """Make the folder."""
        self.scratch.make()
        self.folder = self.scratch.path / NEW
        self.folder.mkdir()
        self._identity = _identity(self.folder)

    @property
    def final(self) -> Path | None:
        """The name that the folder has got; None if it has none yet."""
        names = (self._output, rejected_name(self._output))
        return next((name for name in names if _identity(name, False) == self._identity), None)

    def tidy(self) -> list[Path]:
        """End what was begun; see ``tidy``."""
        return tidy(self.scratch.path, self._replaceable.values(), self._identity)

    def publish(self, *, rejected: bool = False) -> Path:
        """Give the folder its final name, or ``OUT.rejected``, so that its faults can be found.

        Raises:
            InputError: something that may not be overwritten has taken the name meanwhile.
        """
        final = rejected_name(self._output) if rejected else self._output
        with writing(final):
            flush_tree(self.scratch.path)
            try:
                if os.path.lexists(final):
                    self._replace(final)
                else:
                    move(self.folder, final)
            except FileExistsError:
                raise _appeared(final) from None
            except OSError:
                self.tidy()
                if self.final is None:
                    raise
        try:
            flush(final.parent)
        except OSError as error:
            raise InputError(
                f"{final} is written, but the disk does not say whether it will stay there "
                f"({error.strerror}); check the disk"
            ) from error
        return final

    def _replace(self, final: Path) -> None:
        """Take the place of an earlier output, which is then in the hidden folder."""
        expected = self._replaceable.get(final)
        if expected is None or contents(final) != expected:
            raise _appeared(final)
        if not expected:  # an empty folder
            final.rmdir()
            move(self.folder, final)
            return
        if _renameat2(self.folder, final, _EXCHANGE):  # at once
            if contents(self.folder) == expected:
                return
            _renameat2(self.folder, final, _EXCHANGE)
        else:
            old = self.folder.with_name(f"{OLD}{final.name}")
            os.rename(final, old)
            if contents(old) == expected:
                flush(old.parent)
                move(self.folder, final)
                return
            move(old, final)
        raise _appeared(final)


@contextmanager
def staged(output: Path, replaceable: Mapping[Path, Contents]) -> Iterator[Staging]:
    """A temporary folder next to ``output``, which vanishes unless it is published or set aside.

    Args:
        output: the name that the folder may get.
        replaceable: earlier outputs that it may replace; see ``check_output``.

    Raises:
        InputError: the folder cannot be made.
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
            stays = staging.tidy()
        except BaseException:  # an interrupt; the next one is ignored
            stays = staging.tidy()
            raise
        finally:
            staging.scratch.release()
        for path in stays:
            _log.warning(LEFT, plain(str(path)))
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def _appeared(final: Path) -> InputError:
    return InputError(f"{final} has appeared or changed meanwhile; move it away and try again")


# After a run


def tidy(
    scratch: Path, known: Collection[Contents] = (), own: Identity | None = None
) -> list[Path]:
    """End what a run has begun next to its output, and delete what is left of it.

    Args:
        scratch: the folder ``.OUT.xxxxxxxx`` of this run, or of one that is dead.
        known: contents of earlier outputs that may be deleted; any other one is looked at.
        own: what this run has written, which is deleted if it got no name.

    Returns:
        Earlier outputs that stay, since they cannot be deleted or were changed.
    """
    new, stays = scratch / NEW, []
    try:
        for old in scratch.glob(f"{OLD}*"):
            _finish(new, old, scratch.with_name(old.name.removeprefix(OLD)))
            if not new.is_dir():
                _remove(old, known)
            if os.path.lexists(old):
                stays.append(old)
        if not stays and _identity(new, False) != own:
            _remove(new, known)
            if os.path.lexists(new / MANIFEST):  # else it was still being written
                stays.append(new)
    except OSError:
        return [scratch] if os.path.lexists(scratch) else []
    if not stays:
        clear(scratch)
    return stays


def _finish(new: Path, old: Path, final: Path) -> None:
    """Replace an output that lost its name already; if that cannot be, it has its name again."""
    if os.path.lexists(final) or not os.path.lexists(new / MANIFEST):
        return
    try:
        move(new, final)
    except OSError:
        move(old, final)
    flush(final.parent)


def _remove(folder: Path, known: Collection[Contents]) -> None:
    """Delete an earlier output, unless it was changed.

    One recorded name is deleted after the other, and the manifest last, so that a removal that was
    interrupted can be resumed.
    """
    with suppress(OSError, InputError):
        if contents(folder) in known or is_untouched(folder, partly=True):
            recorded = read_json(folder / MANIFEST)["files"]
            for name, (_, _, mode, *_) in sorted(contents(folder).items(), reverse=True):
                if stat.S_ISDIR(mode):  # after what is in it
                    (folder / name).rmdir()
                elif name in recorded:
                    (folder / name).unlink()
            if [path.name for path in folder.iterdir()] == [MANIFEST]:
                (folder / MANIFEST).unlink()
                folder.rmdir()


def sweep(outputs: Iterable[Path], inputs: Inputs) -> None:
    """Report what killed runs left next to outputs and among temporary files.

    It is deleted if growkit made it and no run uses it.

    Args:
        outputs: next to which to look.
        inputs: files that must not be deleted.
    """
    outputs = [*outputs]
    places = [*(path.parent for path in outputs), Path(tempfile.gettempdir())]
    own = {f".{path.name}." for path in outputs}
    for folder in (folder for place in dict.fromkeys(places) for folder in _candidates(place)):
        if inputs.overlap(folder):
            continue
        with suppress(OSError), free(folder / LOCK) as dead:
            if dead:
                if stays := tidy(folder) or [*filter(os.path.lexists, [folder])]:
                    _log.warning(LEFT, plain(str(stays[0])))
                else:
                    _log.warning("deleted %s, which a killed run had left", plain(str(folder)))
                continue
            named = folder.name.startswith("growkit-") or folder.name[:-ENDING] in own
            # A run may have been killed before it could lock its folder.
            if named and stat.S_IMODE(folder.stat().st_mode) == MODE:
                folder.rmdir()  # if it is empty


def _candidates(place: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            found = re.fullmatch(NAMES, entry.name) and entry.is_dir(follow_symlinks=False)
            if found and entry.stat().st_uid == os.geteuid():
                yield Path(entry.path)


# The file system


def flush_tree(folder: Path) -> None:
    """Wait until a folder with everything in it is on the disk: data before names."""
    for name in sorted(contents(folder), reverse=True):  # a folder after what is in it
        flush(folder / name)
    flush(folder)


def move(source: Path, target: Path) -> None:
    """Give a file or folder a name that is free.

    Raises:
        FileExistsError: it is not free.
    """
    if not _renameat2(source, target, _NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """See rename(2); False where the system or the file system does not know such a call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_CALL:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
