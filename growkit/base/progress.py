"""Progress reports of long operations."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, cast

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receiver of progress reports.

    It may also have ``steps(title, total)``, for work that is counted in steps.
    """

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work that is counted in bytes."""
        ...


def nothing(count: int) -> None:
    """Ignore an advance."""


class Silent:
    """Shows nothing."""

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Show nothing."""
        return nullcontext(nothing)


_SHOWN: ContextVar[Progress] = ContextVar("progress", default=Silent())


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Set the receiver of all progress in this context."""
    before = _SHOWN.set(progress)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def current() -> Progress:
    """The progress receiver of the current context."""
    return _SHOWN.get()


def steps(title: str, total: int) -> AbstractContextManager[Advance]:
    """Show work that is counted in steps; as bytes if the receiver does not support steps."""
    counted: Any = getattr(current(), "steps", current().bytes)
    return cast("AbstractContextManager[Advance]", counted(title, total))
