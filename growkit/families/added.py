"""A family that somebody added, for as long as something is done with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growkit.families.family import Family

_ADDED: ContextVar[Family | None] = ContextVar("added", default=None)


def added_family() -> Family | None:
    """The one that is known beside those of the package, if there is one."""
    return _ADDED.get()


@contextmanager
def knowing(description: Mapping[str, Any] | None) -> Iterator[None]:
    """Know a family beside those of the package, and before them.

    Args:
        description: see ``growkit.families.described``; None for no other family than there were.

    Raises:
        InputError: it is none.
    """
    if description is None:
        yield
        return
    from growkit.families.described import described

    token = _ADDED.set(described(description, "the description of the family"))
    try:
        yield
    finally:
        _ADDED.reset(token)
