"""Tamper-evident files of JSON lines, and the working folder of a probe.

Each finished step of work is a line with its own hash, so a killed run loses only its current step.
Work without a line is repeated.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.model.checkpoint.folder import open_regular, read
from growkit.model.checkpoint.inputs import Inputs
from growkit.model.checkpoint.publishing import made_around
from growkit.model.checkpoint.scratch import temporary

JOURNAL, LOCK = "growkit.probe.jsonl", "growkit.lock"

SEAL = "sha256"
"""The key of a line's hash."""

MAX_BYTES = 1 << 30
"""Largest number of bytes read of a file."""

Line = dict[str, Any]


def seal(line: Mapping[str, Any]) -> str:
    """Hash a line without its own hash."""
    return hash_of({key: value for key, value in line.items() if key != SEAL})


def hash_of(value: Any) -> str:
    """Hash plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def append_line(file: Path, line: Mapping[str, Any]) -> Line:
    """Write a line after the last complete one, and wait until it is on the disk.

    Args:
        file: the file; created if it does not exist.
        line: the line without its hash.

    Returns:
        The line with its hash.
    """
    sealed = {**line, SEAL: seal(line)}
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(file, flags, 0o600), "r+b") as stream:
        end = stream.read().rfind(b"\n") + 1  # a kill cut the rest off
        stream.truncate(stream.seek(end))
        stream.write(json.dumps(sealed, allow_nan=False).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    return sealed


def read_lines(file: Path, failure: str) -> list[Line]:
    """Read all complete lines, with their hashes.

    Args:
        file: the file; a missing one has no lines.
        failure: the error about a line that was changed; ``{}`` is its number.

    Raises:
        InputError: a line was changed, or the file cannot be read.
    """
    if not os.path.lexists(file):
        return []
    with open_regular(file) as stream:
        complete = read(stream, MAX_BYTES, file).rpartition(b"\n")[0]
    lines: list[Line] = []
    for number, text in enumerate(complete.splitlines(), 1):
        try:
            lines.append(json.loads(text))
            if lines[-1][SEAL] != seal(lines[-1]):
                raise ValueError(number)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise InputError(f"{file}{failure.format(number)}") from None
    return lines


class Work:
    """A folder for grown models, with the journal of a probe.

    Args:
        folder: an existing folder.
        lines: the journal's lines of an earlier probe.
    """

    def __init__(self, folder: Path, lines: list[Line]) -> None:
        self.folder, self.lines = folder, lines

    def begin(self, plan: Mapping[str, str]) -> None:
        """Record the inputs of the probe.

        Args:
            plan: a hash or value of every input on which the figures depend, by its name for users.

        Raises:
            InputError: the folder holds a probe with other inputs.
        """
        planned = [line["plan"] for line in self.lines if "plan" in line]
        if not self.lines:
            self.note({"plan": dict(plan)})
        elif planned != [plan]:
            before = planned[0] if planned else {}
            other = sorted(key for key in {*before, *plan} if before.get(key) != plan.get(key))
            raise InputError(
                f"{self.folder} holds a probe that cannot be resumed: {', '.join(other)} "
                f"{'differ' if len(other) > 1 else 'differs'} now; choose another --work"
            )

    def find(self, **keys: Any) -> Line | None:
        """Find a line with these values."""
        return next((line for line in self.lines if keys.items() <= line.items()), None)

    def note(self, line: Mapping[str, Any]) -> None:
        """Record a finished step."""
        self.lines.append(append_line(self.folder / JOURNAL, line))


@contextmanager
def workplace(folder: Path | None, inputs: Inputs, resume: bool) -> Iterator[Work]:
    """Open the working folder of a probe, permanent or temporary.

    Args:
        folder: a permanent folder; None for a temporary one.
        inputs: files that must not be overwritten.
        resume: whether to continue the probe in the folder.

    Raises:
        InputError: the probe reads the folder, the folder holds anything but a probe to resume, or
            it cannot be written to.
    """
    if folder is None:
        if resume:
            raise InputError("--resume continues the probe in --work; name that folder")
        with temporary("probe") as scratch:
            yield Work(scratch, [])
        return
    if problem := _problem(folder, inputs, resume):
        raise InputError(f"{problem} choose another --work")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            damaged = " is damaged; choose another --work, and begin again"
            try:
                yield Work(folder, read_lines(folder / JOURNAL, damaged))
            finally:
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    if [path.name for path in folder.iterdir()] == [JOURNAL]:  # nothing was grown
                        (folder / JOURNAL).unlink()
                    folder.rmdir()  # fails if anything is left in it
    except OSError as error:
        where = error.filename or folder
        raise InputError(
            f"{folder} cannot be worked in ({error.strerror}: {where}); choose another --work"
        ) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"--resume continues in {folder}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a working folder.

    Raises:
        InputError: another process holds it.
        OSError: the lock cannot be created.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(OSError):  # the file system may lack locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another probe is at work in {folder}; wait, or choose another --work"
                ) from None
        yield
    finally:
        os.close(descriptor)


def _problem(folder: Path, inputs: Inputs, resume: bool) -> str | None:
    if read := inputs.overlap(folder):
        return f"this probe would work in {folder} and read {read}, which overlap;"
    if model := made_around(folder):
        return f"{folder} would become part of {model}, which growkit wrote;"
    if not os.path.lexists(folder):
        return None
    own = os.path.lexists(folder / JOURNAL)
    if own and not resume:
        return f"{folder} holds an earlier probe; continue it with --resume, or"
    if not folder.is_dir() or (not own and any(path.name != LOCK for path in folder.iterdir())):
        return f"{folder} is not an empty folder;"
    return None
