"""Finished runs: one JSON line each with a hash, and the machine that it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import growkit
from growkit.base.errors import InputError
from growkit.engine.device import device_name
from growkit.extras.probing.json_lines import SEAL, Line, read_lines

KEY = ("experiment", "scale", "run", "seed", "rate", "settings")
"""What identifies the run of a line."""

CHANGED = ": line {} was changed after it was written; restore it, or delete it to repeat the run"


def read(file: Path) -> list[Line]:
    """All lines that are whole, without their hashes.

    Raises:
        InputError: a line was changed, or a run has two.
    """
    lines, known = read_lines(file, CHANGED), set()
    for number, line in enumerate(lines, 1):
        del line[SEAL]
        key = tuple(line.get(each) for each in KEY)
        if None in key:
            raise InputError(f"{file}{CHANGED.format(number)}")
        if key in known:
            raise InputError(f"{file}: line {number} repeats a run; delete one of its lines")
        known.add(key)
    return lines


def read_all(folder: Path) -> list[Line]:
    """All whole lines of a folder's files; see ``read``."""
    return [line for file in sorted(folder.glob("*.jsonl")) for line in read(file)]


def machine(device: str) -> dict[str, Any]:
    """The machine and the versions that figures come from."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device_name(torch.device(device)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "growkit": growkit.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the code that runs, with a + if files differ from it; empty without git."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.yaml")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""
