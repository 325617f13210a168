"""Where long work shows its progress."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, cast

Advance = Callable[[int], None]


class Progress(Protocol):
    """Where long work shows how far it is.

    It may also have ``steps(title, total)``, for work that is counted in steps.
    """

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work that is counted in bytes."""
        ...


def steps(progress: Progress, title: str, total: int) -> AbstractContextManager[Advance]:
    """Show work that is counted in steps; as bytes if ``progress`` knows no steps."""
    counted: Any = getattr(progress, "steps", progress.bytes)
    return cast("AbstractContextManager[Advance]", counted(title, total))


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
