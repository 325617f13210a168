"""Errors of the system, and Ctrl-C, at any call: nothing is lost, and messages are true."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

from tests.faults.world import (
    DONE,
    INTERRUPTED,
    REFUSED,
    Hook,
    World,
    in_child,
)

ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EPERM, errno.EINTR, errno.EROFS),
    *(errno.EMFILE, errno.ENOENT, errno.ESTALE, errno.EBUSY),
)
CTRL_C = 0


def fail_at(place: Path, number: int, code: int, lasting: bool) -> Hook:
    """Fails at the call of the system of this number, counted from 0, or from there on.

    What is about files elsewhere (those of Python itself, say) does not fail.
    """
    done = 0

    def hook(name: str, after: bool, about: object) -> None:
        nonlocal done
        if after or name == "close":  # which has happened, or frees what else would stay open
            return
        if isinstance(about, str | Path) and not Path(about).is_relative_to(place):
            return
        done += 1
        if done - 1 == number or (lasting and done > number):
            if code == CTRL_C:
                raise KeyboardInterrupt
            named = [str(about)] if isinstance(about, str | Path) else []
            raise OSError(code, os.strerror(code), *named)

    return hook


class Errors:
    """Lets calls of the system fail, and looks at what is left.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: Path) -> None:
        self.world = World(place)
        self.seen: Counter[str] = Counter()

    def one(self, chance: random.Random) -> None:
        """Let one run fail, at random.

        Raises:
            AssertionError: something is lost, half-written, not said, or not cleaned up.
        """
        world = self.world
        overwrite, exchanging = chance.random() < 0.7, chance.random() < 0.7
        inside = chance.choice(["", "publishing"])
        code = chance.choice([*ERRORS, CTRL_C, CTRL_C])
        lasting = code != CTRL_C and chance.random() < 0.4
        key = inside, overwrite, exchanging
        count = world.calls(inside, overwrite=overwrite, exchanging=exchanging) // 2
        world.reset(overwrite=overwrite)
        number, run = chance.randrange(count), world.growing(exchanging)
        end, said = in_child(run, fail_at(world.place.parent, number, code, lasting), inside)
        what = f"{errno.errorcode.get(code, 'Ctrl-C')} at {number} {inside} {key} {lasting}: {said}"
        state = world.state()
        if overwrite and not exchanging and state == "none":
            # Every further call failed as well: the next run finishes it.
            assert lasting or code == CTRL_C, what
        else:
            assert state in ("old" if overwrite else "none", "new"), what
        assert end in (DONE, REFUSED, INTERRUPTED), what
        assert end != DONE or state == "new", what
        assert (end == INTERRUPTED) <= (code == CTRL_C), what
        if end == REFUSED:
            assert ("is written" in said) == (state == "new"), what
            assert len(said.strip().splitlines()) <= 2, what
        if "is written" in said:
            assert state == "new", what
        if not lasting and end != DONE and code != CTRL_C:
            self.seen["one error, and something is left for the next run"] += bool(
                world.leftovers()
            )
        ends = {DONE: "done all the same", REFUSED: "refused", INTERRUPTED: "interrupted"}
        self.seen[f"{ends[end]}: the output is {state}"] += 1
        world.check_next_run()
