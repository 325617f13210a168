"""SIGKILL at any moment, half of them while an output gets its name: what is left, and what next?

python -m tests.faults.kills --count 300
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from growkit import InputError, grow
from tests.faults.world import Hook, World, in_child

ANYWHERE, PUBLISHING, ANY_TIME = "anywhere", "publishing", "any time"


def kill_at(number: int) -> Hook:
    """Dies at the call of the system of this number, counted from 0."""
    left = iter(range(number))

    def hook(name: str, after: bool, about: object) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def kill_after(seconds: float) -> None:
    """Dies at a moment, whatever it is doing then."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


class Kills:
    """Kills runs, and looks at what is left.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: Path) -> None:
        self.world = World(place)
        self.seen: Counter[str] = Counter()

    def one(self, chance: random.Random, where: str) -> None:
        """Kill one run, at random.

        Raises:
            AssertionError: something is lost, half-written, or not cleaned up by the next run.
        """
        overwrite = where == PUBLISHING or chance.random() < 0.6
        exchanging = chance.random() < 0.7
        proved = where == ANY_TIME and chance.random() < 0.3
        self.kill(where, overwrite, exchanging, chance.random(), proved=proved)

    def kill(
        self,
        where: str,
        overwrite: bool,
        exchanging: bool,
        moment: float,
        *,
        proved: bool = False,
    ) -> None:
        """Kill one run.

        Args:
            where: among which moments.
            overwrite: whether there is an earlier output.
            exchanging: whether the file system can exchange names.
            moment: when among these, from 0 to 1.
            proved: whether the run has a proof.
        """
        world = self.world
        run = world.growing(exchanging, proved=proved)
        world.reset(overwrite=overwrite)
        if where == ANY_TIME:
            seconds = 0.001 + moment * (3.0 if proved else 0.15)
            code, said = in_child(lambda: (kill_after(seconds), run()))
        else:
            inside = where if where == PUBLISHING else ""
            number = int(moment * self.calls(where, overwrite, exchanging))
            world.reset(overwrite=overwrite)
            code, said = in_child(run, kill_at(number), inside)
            assert code == -signal.SIGKILL, said
        state = world.state()
        allowed = {"old" if overwrite else "none", "new"}
        if overwrite and not exchanging:
            allowed.add("none")  # between two names; the next run finishes it
        assert state in allowed, f"the output is {state}"
        self.seen[f"{where}: {state}{'' if exchanging else ', with a journal'}"] += 1
        if state == "none" and overwrite:
            self.check_finished()
        world.check_next_run()

    def calls(self, where: str, overwrite: bool, exchanging: bool) -> int:
        """The number of moments there are."""
        inside = where if where == PUBLISHING else ""
        return self.world.calls(inside, overwrite=overwrite, exchanging=exchanging)

    def check_finished(self) -> None:
        """The next run finishes what was begun, also one that refuses to overwrite."""

        def refused() -> None:
            tempfile.tempdir = str(self.world.temporary)
            with pytest.raises(InputError, match="--overwrite"):
                grow(self.world.source, self.world.out, hidden="x2", verify=False)

        code, said = in_child(refused)
        assert code == 0, said
        assert self.world.state() == "new"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="every moment of publishing, in turn")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = Kills(Path(folder))
        if arguments.every:
            for exchanging in (True, False):
                for overwrite in (True, False):
                    count = kills.calls(PUBLISHING, overwrite, exchanging)
                    for number in range(count):
                        kills.kill(PUBLISHING, overwrite, exchanging, (number + 0.5) / count)
        else:
            places = [PUBLISHING, ANYWHERE, PUBLISHING, ANY_TIME]
            for number in range(arguments.count):
                kills.one(chance, places[number % len(places)])
    for what, count in sorted(kills.seen.items()):
        sys.stdout.write(f"{count:5} {what}\n")
    total, seconds = kills.seen.total(), time.monotonic() - started
    sys.stdout.write(f"{total:5} kills in {seconds:.0f} s: nothing lost, every next run clean\n")


if __name__ == "__main__":
    main()
