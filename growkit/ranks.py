"""Several processes that write one output: started by torchrun, they share its shards out.

When these are written, they share out what is looked at tensor by tensor in the proof. The first
plans, tells the others what to do, and does everything else. They speak through the store
of torch.distributed, by short questions that never wait: so every signal is heeded, and whoever
fails is noticed by all. That a process lives is seen from a lock that it holds in the folder that
they write to, which the system lets go of however it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from growkit.checkpoint.journal import Finished
from growkit.checkpoint.scratch import held, holding
from growkit.errors import InputError, foreign, reason

_log = getLogger("growkit")

PAUSE, HEED = 0.05, 1.0
"""Seconds between two questions: of who waits, and of who writes."""

PATIENCE = 300.0
"""Seconds until another process must have begun."""

FAREWELL = 10.0
"""Seconds that the first waits for the others to end before it deletes what they write to."""


@dataclass(frozen=True)
class Task:
    """What the first process tells the others to do.

    Attributes:
        folder: where shards go.
        made: SHA-256 of what is being made.
        read: size and time of the last change of every file of the source.
        shards: names of those that are shared out.
    """

    folder: str
    made: str
    read: dict[str, list[int]]
    shards: list[str]


class Share(Protocol):
    """One process among those that write."""

    def take(self, shards: Sequence[str]) -> Iterator[str]:
        """The shards that this process is to write; every shard is taken by one of all."""
        ...

    def count(self, count: int) -> None:
        """So many bytes are written."""
        ...

    def heed(self) -> None:
        """Look after the others, now and then.

        Raises:
            InputError: one of them has failed.
        """
        ...

    def report(self, finished: Mapping[str, Finished]) -> None:
        """Tell the first process what is finished."""
        ...

    def gather(self) -> dict[str, Finished]:
        """What all others have finished, as soon as they have."""
        ...

    def asked(self) -> list[str]:
        """The tensors that this process is to look at, as soon as that is known."""
        ...

    def tell_lost(self, names: Iterable[str]) -> None:
        """Tell the first process which of them are not what they should be."""
        ...


class Ranks(Protocol):
    """All processes that write one output."""

    rank: int

    def heed(self) -> None:
        """See ``Share``."""
        ...

    def divide(self, names: Sequence[str]) -> Sequence[str]:
        """Share out tensors that are to be looked at, the largest first.

        Returns:
            Those that are left to this process.
        """
        ...

    def lost(self) -> set[str]:
        """What the others have found not to be what it should be, once they have looked."""
        ...

    def let_go(self) -> None:
        """Nothing is left to do for the others."""
        ...

    def leading(
        self, folder: Path, task: Task, advance: Callable[[int], None]
    ) -> AbstractContextManager[Share]:
        """Write together with the others.

        Args:
            folder: the hidden folder.
            task: of the others.
            advance: called with the number of bytes that others have written.
        """
        ...

    def following(self) -> AbstractContextManager[tuple[Task, Share]]:
        """Write what the first process says."""
        ...


class Alone:
    """One process, which writes everything."""

    rank = 0

    def leading(
        self, folder: Path, task: Task, advance: Callable[[int], None]
    ) -> AbstractContextManager[Share]:
        """See ``Ranks``."""
        return nullcontext(self)

    def following(self) -> AbstractContextManager[tuple[Task, Share]]:
        """See ``Ranks``."""
        raise AssertionError("nobody leads")

    def take(self, shards: Sequence[str]) -> Iterator[str]:
        """See ``Share``."""
        return iter(shards)

    def count(self, count: int) -> None:
        """See ``Share``."""

    def heed(self) -> None:
        """See ``Share``."""

    def report(self, finished: Mapping[str, Finished]) -> None:
        """See ``Share``."""

    def gather(self) -> dict[str, Finished]:
        """See ``Share``."""
        return {}

    def asked(self) -> list[str]:
        """See ``Share``."""
        return []

    def tell_lost(self, names: Iterable[str]) -> None:
        """See ``Share``."""

    def divide(self, names: Sequence[str]) -> Sequence[str]:
        """See ``Ranks``."""
        return names

    def lost(self) -> set[str]:
        """See ``Ranks``."""
        return set()

    def let_go(self) -> None:
        """See ``Ranks``."""


ALONE = Alone()


class Together:
    """Processes that speak through a store.

    Args:
        store: of torch.distributed.
        rank: number of this process; 0 leads.
        size: number of all.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self._size = store, rank, size
        self._folder = Path()
        self._begun = self._heeded = time.monotonic()
        self._heeding = Lock()
        self._counted, self._shown = 0, 0
        self._awaited = "done"
        self._advance: Callable[[int], None] = lambda count: None

    @contextmanager
    def leading(self, folder: Path, task: Task, advance: Callable[[int], None]) -> Iterator[Share]:
        """See ``Ranks``."""
        self._folder, self._advance, self._begun = folder, advance, time.monotonic()
        self._set("task", asdict(task))
        try:
            yield self
        except BaseException as error:
            self.fail(error)
            self._wait_for_the_others()
            raise

    @contextmanager
    def following(self) -> Iterator[tuple[Task, Share]]:
        """See ``Ranks``."""
        while not self._has("task"):
            self._check_failed()
            time.sleep(PAUSE)
        task = Task(**self._get("task"))
        self._folder = Path(task.folder).parent
        try:
            lock = holding(self._lock(self.rank))
            lock.__enter__()
        except OSError as error:
            raise InputError(
                f"rank {self.rank} cannot write to {self._folder} ({error.strerror}); the output "
                "must be on a file system that all ranks share"
            ) from error
        try:
            yield task, self
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            lock.__exit__(None, None, None)

    def take(self, shards: Sequence[str]) -> Iterator[str]:
        """See ``Share``."""
        while (number := self._add("taken", 1) - 1) < len(shards):
            yield shards[number]

    def count(self, count: int) -> None:
        """See ``Share``."""
        with self._heeding:
            self._counted += count

    def heed(self) -> None:
        """See ``Share``."""
        now = time.monotonic()
        if now - self._heeded < HEED or not self._heeding.acquire(blocking=False):
            return
        try:
            self._heeded = now
            self._look()
        finally:
            self._heeding.release()

    def report(self, finished: Mapping[str, Finished]) -> None:
        """See ``Share``."""
        self._look()
        self._set(f"done/{self.rank}", {name: asdict(each) for name, each in finished.items()})

    def gather(self) -> dict[str, Finished]:
        """See ``Share``."""
        found: dict[str, Finished] = {}
        for rank in self._others():
            done = self._answer(f"done/{rank}")
            found |= {name: Finished(**each) for name, each in done.items()}
        self._look()
        return found

    def divide(self, names: Sequence[str]) -> Sequence[str]:
        """See ``Ranks``."""
        self._awaited, self._advance = "lost", lambda count: None
        own, *others = (list(names[rank :: self._size]) for rank in range(self._size))
        self._set("looked at", {str(rank): each for rank, each in enumerate(others, 1)})
        return own

    def asked(self) -> list[str]:
        """See ``Share``."""
        while not self._has("looked at"):
            try:
                self._look()
            except InputError:
                if not self._has("looked at"):  # else the first one may have ended, and well
                    raise
            time.sleep(PAUSE)
        names: list[str] = self._get("looked at").get(str(self.rank), [])
        return names

    def tell_lost(self, names: Iterable[str]) -> None:
        """See ``Share``."""
        self._set(f"lost/{self.rank}", dict.fromkeys(names, True))

    def lost(self) -> set[str]:
        """See ``Ranks``."""
        return {name for rank in self._others() for name in self._answer(f"lost/{rank}")}

    def let_go(self) -> None:
        """See ``Ranks``."""
        if not self._has("looked at"):
            self._set("looked at", {})

    def _others(self) -> range:
        return range(1, self._size)

    def _answer(self, key: str) -> dict[str, Any]:
        """What another process tells, as soon as it does."""
        while not self._has(key):
            self._look()
            time.sleep(PAUSE)
        return self._get(key)

    def fail(self, error: BaseException) -> None:
        """Tell all others that this process ends, and why."""
        if isinstance(error, InputError):
            why = str(error)
        else:
            ends = {KeyboardInterrupt: "it was interrupted", SystemExit: "it was told to end"}
            why = ends.get(type(error)) or f"{type(error).__name__}: {reason(error)}"
        try:
            self._store.set("failed", json.dumps({"rank": self.rank, "why": why}))
        except RuntimeError:  # the others notice that this one is gone
            return

    def _look(self) -> None:
        """Look whether all others go on, and how far they are."""
        self._check_failed()
        if self.rank:
            counted, self._counted = self._counted, 0
            self._add("bytes", counted)
            if not held(self._folder / "growkit.lock"):
                raise self._gone(0)
            return
        shown = self._add("bytes", 0)
        self._advance(shown - self._shown)
        self._shown = shown
        late = time.monotonic() - self._begun > PATIENCE
        for rank in self._others():
            lives = held(self._lock(rank))
            dead = lives is False or (lives is None and late)
            if dead and not self._has(f"{self._awaited}/{rank}"):
                self._check_failed()
                raise self._gone(rank)

    def _gone(self, rank: int) -> InputError:
        return InputError(
            f"rank {rank} has ended before its work was done; look for what it said, and start all "
            "ranks again"
        )

    def _check_failed(self) -> None:
        if self._has("failed"):
            failed = self._get("failed")
            raise InputError(f"rank {failed['rank']} has failed: {failed['why']}")

    def _wait_for_the_others(self) -> None:
        """Until none of them writes any more, for a while."""
        end = time.monotonic() + FAREWELL
        others = [self._lock(rank) for rank in self._others()]
        while any(held(lock) for lock in others) and time.monotonic() < end:
            time.sleep(PAUSE)

    def _lock(self, rank: int) -> Path:
        return self._folder / f"growkit.rank.{rank}"

    def _touch(self) -> AbstractContextManager[None]:
        return foreign(f"rank {self.rank} has lost touch with the others", "start all ranks again")

    def _has(self, key: str) -> bool:
        with self._touch():
            return bool(self._store.check([key]))

    def _get(self, key: str) -> dict[str, Any]:
        with self._touch():
            found: dict[str, Any] = json.loads(self._store.get(key))
            return found

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        with self._touch():
            self._store.set(key, json.dumps(value))

    def _add(self, key: str, count: int) -> int:
        with self._touch():
            return int(self._store.add(key, count))


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that torchrun has started; this one alone, if it has not.

    If this process fails in here, all are told.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous

    with foreign("the ranks did not find each other", "start them with torchrun"):
        found = rendezvous("env://", timeout=timedelta(seconds=PATIENCE))
        together = Together(*next(found))
    try:
        yield together
    except SystemExit as error:  # torchrun ends all when one has ended
        together.fail(error)
        _log.warning("rank %d was told to end before its work was done", together.rank)
        raise
    except BaseException as error:
        together.fail(error)
        raise
