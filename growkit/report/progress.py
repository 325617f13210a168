"""What people read: progress, tables, model cards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Where long work shows how far it is."""

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work that is counted in bytes."""
        ...


def _nothing(count: int) -> None:
    pass


class Silent:
    """Shows nothing."""

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Nothing to see."""
        return nullcontext(_nothing)
