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
def temporary_family(description: Mapping[str, Any] | None) -> Iterator[None]:
    """Know a family beside those of the package, and before them.

    Args:
        description: see ``growkit.families.described``; None for those of the package alone.

    Raises:
        InputError: it is none.
    """
    from growkit.families.described import described

    where = "the description of the family"
    token = _ADDED.set(None if description is None else described(description, where))
    try:
        yield
    finally:
        _ADDED.reset(token)


def stranger(description: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A description that comes with a folder, where growkit has no family for its type; else None.

    Raises:
        InputError: it is no description.
    """
    from growkit.families.described import described
    from growkit.families.family import own_families

    if description is None:
        return None
    (kind,) = described(description, "the description of the family").model_types
    known = any(kind in family.model_types for family in own_families().values())
    return None if known else description
