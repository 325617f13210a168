"""The folder in which a probe works, and what it notes there for one that goes on.

A line is written when a candidate is grown or a training is over, so that a probe that was killed
loses no more than the training it was at. The first line says what is probed, with everything on
which a number depends. Every line has a hash of itself and of all before it, so that a line that
was changed, added, moved or removed is noticed; only at the end can lines be missing, as after a
kill, and what they said is measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.atomic import flush
from growkit.checkpoint.folder import open_regular, read
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.made import made_around
from growkit.checkpoint.scratch import LOCK, held, holding, temporary
from growkit.probing.training import Look

JOURNAL = "growkit.probe.jsonl"

SEAL = "sha256"
"""The key of a line's hash."""

MOST_BYTES = 1 << 30
"""Size of a journal, at most."""


class Work:
    """A folder for grown models, with a journal.

    Args:
        folder: which exists.
        lines: that an earlier probe wrote there, with their hashes.
    """

    def __init__(self, folder: Path, lines: list[dict[str, Any]]) -> None:
        self.folder = folder
        self._lines = lines
        self._last: str = lines[-1][SEAL] if lines else ""

    def begin(self, plan: Mapping[str, str]) -> None:
        """Say what is probed.

        Args:
            plan: everything on which numbers depend, by what people call it.

        Raises:
            InputError: an earlier probe, of something else, has begun here.
        """
        if not self._lines:
            self._note({"plan": dict(plan)})
            return
        made = self._lines[0].get("plan")
        before = made if isinstance(made, dict) else {}
        other = sorted(key for key in {*before, *plan} if before.get(key) != plan.get(key))
        if other:
            raise InputError(
                f"{self.folder} holds a probe that cannot be resumed: {', '.join(other)} "
                f"{'differ' if len(other) > 1 else 'differs'} now; choose another --work"
            )

    def grown(self, folder: str) -> dict[str, Any] | None:
        """What was noted of a candidate that is grown; None if nothing was."""
        return next((line for line in self._lines if line.get("grown") == folder), None)

    def note_grown(self, folder: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """A candidate is grown, or cannot be."""
        return self._note({"grown": folder, **found})

    def trained(
        self, folder: str, lr: float, seed: int, steps: int, windows: int
    ) -> list[Look] | None:
        """The losses of a training that is over; None if it is not.

        Args:
            folder: of the candidate.
            lr: the rate of the source.
            seed: of the order of the windows.
            steps: of the training.
            windows: that are held out.

        Raises:
            InputError: what was noted is not of such a training.
        """
        for line in self._lines:
            if (line.get("trained"), line.get("lr"), line.get("seed")) == (folder, lr, seed):
                looks = [Look(int(step), losses) for step, losses in line["looks"]]
                if not _is_whole(looks, steps, windows):
                    raise damaged(self.folder / JOURNAL)
                return looks
        return None

    def note_trained(self, folder: str, lr: float, seed: int, looks: list[Look]) -> None:
        """A training is over."""
        found = [[look.step, look.losses] for look in looks]
        self._note({"trained": folder, "lr": lr, "seed": seed, "looks": found})

    def _note(self, line: dict[str, Any]) -> dict[str, Any]:
        self._last = seal(line, self._last)
        text = json.dumps({**line, SEAL: self._last}, allow_nan=False) + "\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(self.folder / JOURNAL, flags, 0o600), "wb") as journal:
            journal.write(text.encode())
            journal.flush()
            os.fsync(journal.fileno())
        self._lines.append(line)
        return line


@contextmanager
def workplace(folder: Path | None, inputs: Inputs, resume: bool) -> Iterator[Work]:
    """Where a probe works: a folder that stays, or one among temporary files that vanishes.

    Args:
        folder: the one that stays; None for the other. See ``check_work``.
        inputs: files that must not be overwritten.
        resume: whether to continue the probe in the folder.

    Raises:
        InputError: see ``check_work``; or another probe is at work there.
    """
    if folder is None:
        with temporary("probe") as scratch:
            yield Work(scratch, [])
        return
    check_work(folder, inputs, resume)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with holding(folder / LOCK):
            try:
                yield Work(folder, _read(folder))
            finally:
                _tidy(folder, missing)
    except OSError as error:
        where = error.filename or folder
        raise InputError(
            f"{folder} cannot be worked in ({error.strerror}: {where}); choose another --work"
        ) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"--resume continues in {folder}") from None


def _tidy(folder: Path, missing: Sequence[Path]) -> None:
    """Leave a folder only if something was grown in it."""
    with suppress(OSError):
        (folder / LOCK).unlink()
        if {each.name for each in folder.iterdir()} <= {JOURNAL}:
            (folder / JOURNAL).unlink(missing_ok=True)
            for each in missing:
                each.rmdir()


def check_work(folder: Path | None, inputs: Inputs, resume: bool) -> None:
    """Refuse a work folder that the probe reads, or that holds anything but a probe to resume.

    Raises:
        InputError: with what to do about it.
    """
    if folder is None:
        if resume:
            raise InputError("--resume continues the probe in --work; name that folder")
        return
    read = inputs.inside(folder) or inputs.around(folder)
    if read is not None:
        raise InputError(
            f"this probe would work in {folder} and read {read}, which overlap; choose another "
            "--work"
        )
    if model := made_around(folder):
        raise InputError(
            f"{folder} would become part of {model}, which growkit wrote; choose another --work"
        )
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder to work in; choose another --work")
    own = os.path.lexists(folder / JOURNAL)
    if any(each.name != LOCK for each in folder.iterdir()) and not (own and resume):
        told = (
            "holds an earlier probe; continue it with --resume, or choose another --work"
            if own
            else "is not empty; choose another --work"
        )
        raise InputError(f"{folder} {told}")
    among = inputs.among(folder)
    if among is not None:
        raise InputError(f"{folder} holds {among}, which this probe reads; choose another --work")
    if held(folder / LOCK):
        raise InputError(f"another probe is at work in {folder}; wait, or choose another --work")


def _read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that a kill has cut off is taken out of the file."""
    file = folder / JOURNAL
    if not os.path.lexists(file):
        return []
    with open_regular(file) as stream:
        content = read(stream, MOST_BYTES, file)
    whole, _, rest = content.rpartition(b"\n")
    if rest:
        os.truncate(file, len(content) - len(rest))
        flush(file)
    lines: list[dict[str, Any]] = []
    last = ""
    for text in whole.splitlines():
        try:
            line = json.loads(text)
            sound = _is_line(line) and line.get(SEAL) == (last := seal(line, last))
        except (ValueError, RecursionError):
            sound = False
        if not sound:
            raise damaged(file)
        lines.append(line)
    return lines


def seal(line: Mapping[str, Any], before: str = "") -> str:
    """The hash of a line without its own, and of the one before it.

    Args:
        line: any JSON.
        before: the hash of the line before; empty where lines may be in any order.
    """
    own = {key: value for key, value in line.items() if key != SEAL}
    return hashlib.sha256((before + json.dumps(own, sort_keys=True)).encode()).hexdigest()


def damaged(journal: Path) -> InputError:
    """What is to be said of a journal that no probe has written like that."""
    return InputError(f"{journal} is damaged; choose another --work, and begin again")


def _is_line(line: Any) -> bool:
    match line:
        case {"plan": dict()}:
            return True
        case {"grown": str(), "reason": None, "promise": _, "parameters": int()}:
            flops = line.get("step_flops")
            return line.get("outcome") == "grown" and isinstance(flops, int) and flops > 0
        case {"grown": str(), "reason": str(), "promise": _, "parameters": _, "step_flops": None}:
            return line.get("outcome") in ("broken", "refused")
        case {"trained": str(), "lr": float(), "seed": int(), "looks": [*looks]}:
            return all(map(_is_look, looks))
    return False


def _is_look(look: Any) -> bool:
    match look:
        case [int(), None]:
            return True
        case [int(), [*losses]]:
            return all(isinstance(loss, float) and math.isfinite(loss) for loss in losses)
    return False


def _is_whole(looks: Sequence[Look], steps: int, windows: int) -> bool:
    """Whether looks go from a training's beginning to its end, or to a loss that is not finite."""
    after = [look.step for look in looks]
    if not looks or after[0] != 0 or any(b < a for a, b in pairwise(after)):
        return False
    ended = looks[-1].losses is None or after[-1] == steps
    known = looks[:-1] if looks[-1].losses is None else looks
    return ended and all(look.losses is not None and len(look.losses) == windows for look in known)
