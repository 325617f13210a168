"""Runs that are killed, one process or one of several, and runs that go on with what is left."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from growkit import ranks
from growkit.checkpoint.journal import read_journals
from tests.faults.moments import kill_after, kill_at
from tests.faults.world import DONE, REFUSED, Hook, World, count_calls, ended, started

SHARDS = "20KB"


def store_of_an_agent() -> int:
    """The port of a store that outlives the processes that use it, as that of torchrun's agent.

    It is in a process of its own: threads of this one would be lost in its children.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)
    port = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    return port


def as_the_agent(children: list[int], victim: int) -> None:
    """End what waits for a process that is dead, as torchrun does; most end by themselves."""

    def lives(child: int) -> bool:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    os.waitid(os.P_PID, children[victim], os.WEXITED | os.WNOWAIT)
    end = time.monotonic() + 5
    while any(map(lives, children)) and time.monotonic() < end:
        time.sleep(0.02)
    for child in filter(lives, children):
        os.kill(child, signal.SIGTERM)


class Resumed:
    """Kills runs that write several shards, and goes on with each.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: Path) -> None:
        self.world = World(place, SHARDS)
        self.seen: Counter[str] = Counter()
        self.kills = 0
        self._port = store_of_an_agent()
        self._numbers = itertools.count()
        self._moments = count_calls(lambda: self.world.grow(1))

    def one(self, chance: random.Random) -> None:
        """Kill a run, perhaps the one that goes on as well, and let the last one go on.

        Raises:
            AssertionError: something is lost, half-written, not the same or not cleaned up.
        """
        size, again = chance.choice([1, 1, 2, 4]), chance.choice([1, 1, 2])
        self.world.reset(overwrite=False)
        for _ in range(again):
            self.kill(chance, size)
        self.go_on(chance.choice([1, size]))

    def kill(self, chance: random.Random, size: int) -> None:
        """Kill one process of a run at random; the others must end by themselves."""
        proved = chance.random() < 0.1
        victim = chance.randrange(size)
        if chance.random() < 0.4:
            killing: Any = partial(kill_after, 0.001 + chance.random() * (2.0 if proved else 0.15))
            hook = None
        else:
            killing, hook = None, kill_at(chance.randrange(self._moments // (2 if victim else 1)))
        ends = self.run(size, victim, killing, hook, proved=proved)
        self.kills += 1
        for rank, (code, said) in enumerate(ends):
            assert code in (DONE, REFUSED, *([-9, -14] if rank == victim else [-15])), (rank, said)
            assert len(said.strip().splitlines()) <= 3, said
        assert self.world.state() in ("none", "new")
        if self.world.state() == "none":
            assert any(code != DONE for code, _ in ends)
        left = sum(len(read_journals(each)[1]) for each in self.world.place.glob(".out.*"))
        end = "done all the same" if self.world.state() == "new" else f"{left} shards finished"
        self.seen[f"{size} ranks, rank {victim} killed: {end}"] += 1

    def go_on(self, size: int) -> None:
        """The last run."""
        for code, said in self.run(size):
            assert code == DONE, said
        assert self.world.state() == "new"
        assert not self.world.leftovers(), self.world.leftovers()

    def run(
        self,
        size: int,
        victim: int = 0,
        killing: Any = None,
        hook: Hook | None = None,
        *,
        proved: bool = False,
    ) -> list[tuple[int, str]]:
        """How the processes of a run end, of which one may be killed."""
        number = next(self._numbers)

        def rank(rank: int) -> None:
            if killing and rank == victim:
                killing()
            if killing or hook:
                ranks.PATIENCE = 3.0
            together = ranks.ALONE if size == 1 else self._together(number, rank, size)
            self.world.run(together, proved=proved, resume=True)

        children = [
            started(partial(rank, each), hook if each == victim else None) for each in range(size)
        ]
        if killing or hook:
            as_the_agent([pid for pid, _ in children], victim)
        return [ended(child) for child in children]

    def _together(self, number: int, rank: int, size: int) -> ranks.Together:
        store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=timedelta(seconds=60))
        return ranks.Together(PrefixStore(str(number), store), rank, size)
