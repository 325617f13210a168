"""Where long work shows its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

Advance = Callable[[int], None]


class Progress(Protocol):
    """Where long work shows how far it is."""

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work that is counted in bytes."""
        ...


@runtime_checkable
class Counting(Progress, Protocol):
    """One that shows what is counted in steps as such."""

    def steps(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work that is counted in steps."""
        ...


@runtime_checkable
class Noting(Progress, Protocol):
    """One that shows sentences as well."""

    def note(self, sentence: str) -> None:
        """Show a sentence."""
        ...


def steps(progress: Progress, title: str, total: int) -> AbstractContextManager[Advance]:
    """Show work that is counted in steps, as bytes where nothing else is known."""
    counted = progress.steps if isinstance(progress, Counting) else progress.bytes
    return counted(title, total)


def nothing(count: int) -> None:
    """Advance nothing."""


class Silent:
    """Shows nothing."""

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Nothing to see."""
        return nullcontext(nothing)


_SHOWN: ContextVar[Progress] = ContextVar("progress", default=Silent())


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Let work in here show its progress without an argument, such as an operation's plan."""
    before = _SHOWN.set(progress)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def current() -> Progress:
    """Where work shows how far it is."""
    return _SHOWN.get()
