"""Going on with what a killed run has left: its finished shards, each verified first.

They are moved into the folder of the run that goes on, one after the other, and noted in its own
journal: when that is killed as well, the next one finds some in this folder and some in that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from contextlib import ExitStack
from logging import getLogger
from pathlib import Path

from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.journal import Finished, Journal, Plan, read_journals
from growkit.checkpoint.leftovers import leftovers
from growkit.checkpoint.publishing import NEW, tidy
from growkit.checkpoint.scratch import dead
from growkit.errors import InputError, plain
from growkit.report.progress import Advance, Progress

_log = getLogger("growkit")


def take_over(
    output: Path,
    plan: Callable[[], Plan],
    wanted: Collection[str],
    folder: Path,
    journal: Journal,
    progress: Progress,
) -> dict[str, int]:
    """Take over what is finished of an output; the rest of what was left is deleted.

    Args:
        output: the name that is asked for.
        plan: gives what is being made.
        wanted: names of shards that can be taken over.
        folder: of this run, where they go.
        journal: of this run.
        progress: where progress is shown.

    Returns:
        The names of the shards that were taken over, and the size of their files.

    Raises:
        InputError: what is left is of something else.
    """
    taken: dict[str, int] = {}
    with ExitStack() as stack:
        found = [
            (each, *read_journals(each))
            for each in leftovers(output)
            if stack.enter_context(dead(each))
        ]
        for each, made, _ in found:
            assert made is not None, "without it nothing is gone on with"
            _check_same(each, made, plan(), output)
        total = sum(shard.bytes for *_, shards in found for shard in shards.values())
        with progress.bytes("checking", total) as advance:
            for each, _, shards in found:
                for name in sorted(shards.keys() & {*wanted} - taken.keys()):
                    if _as_finished(each / NEW / name, shards[name], advance):
                        os.rename(each / NEW / name, folder / name)
                        journal.note(name, shards[name])
                        taken[name] = shards[name].bytes
                journal.finished()  # before anything that could be needed again is deleted
                tidy(each)
    return taken


def _check_same(folder: Path, made: Plan, plan: Plan, output: Path) -> None:
    """Refuse to go on with something else."""
    other = sorted(key for key in {*made, *plan} if made.get(key) != plan.get(key))
    if other:
        raise InputError(
            f"{folder} holds what a killed run has begun of {output}, which cannot be gone on "
            f"with: {' and '.join(other)} {'are' if len(other) > 1 else 'is'} another now; leave "
            "out --resume to delete it and begin again"
        )


def _as_finished(file: Path, finished: Finished, advance: Advance) -> bool:
    """Whether a shard still is what it was when it was finished."""
    try:
        status = file.lstat()
        regular = stat.S_ISREG(status.st_mode)
        if not regular or status.st_size != finished.bytes:
            advance(finished.bytes)
            same = False
        else:
            same = sha256(file, advance=advance) == finished.sha256
    except (OSError, InputError):
        same = False
    if not same:
        _log.warning("%s is not what was finished, so it is written again", plain(str(file)))
    return same
