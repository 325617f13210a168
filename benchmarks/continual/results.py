"""Finished runs, one JSON line each; a line that a kill cut short is as if it were not there."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import growkit
from growkit.probing.work import SEAL, seal

Line = dict[str, Any]
KEY = ("experiment", "scale", "run", "seed", "rate")
"""What says which run a line is of."""


def read(file: Path) -> list[Line]:
    """All lines that are whole.

    Raises:
        SystemExit: a line is not as it was written, or a run has two.
    """
    if not file.is_file():
        return []
    whole = file.read_bytes().rpartition(b"\n")[0]
    lines: list[Line] = []
    known = set()
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            if line.pop(SEAL) != seal(line):
                raise ValueError
            key = *key_of(line), line["settings"]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise SystemExit(
                f"{file}: line {number} was changed after it had been written; restore it, or "
                "delete it to do the run again"
            ) from None
        if key in known:
            raise SystemExit(f"{file}: line {number} repeats a run; delete one of its lines")
        known.add(key)
        lines.append(line)
    return lines


def read_all(folder: Path) -> list[Line]:
    """All whole lines of a folder's files; see ``read``."""
    return [line for file in sorted(folder.glob("*.jsonl")) for line in read(file)]


def append(file: Path, line: Line) -> None:
    """Add a line, behind all that are whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        stream.truncate(len(b"".join(stream.read().rpartition(b"\n")[:2])))
        text = json.dumps({**line, SEAL: seal(line)}, allow_nan=False)
        stream.write(text.encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def key_of(line: Line) -> tuple[Any, ...]:
    """Which run it is of."""
    return tuple(line[each] for each in KEY)


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether a run is this process's to do: one process at a time has its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def machine(device: str) -> dict[str, Any]:
    """Where and with what figures are made."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "growkit": growkit.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Of the code that runs; with a + if files differ from it."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.yaml")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""
