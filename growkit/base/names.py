"""Names that nobody knows, and the ones that were meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

LONGEST = 100
"""Characters of a name that are looked at; nothing is called by more."""

LISTED = 20
"""Names that a sentence lists next to the one that was probably meant, at most."""

NOTHING: Mapping[str, str] = MappingProxyType({})


def nearest(name: object, known: Iterable[str], called: Mapping[str, str] = NOTHING) -> str | None:
    """The known name that was probably meant; None if none is near.

    Capital letters, and what parts words, do not count. The beginning of a single one will do.

    Args:
        name: the unknown one.
        known: those that there are.
        called: what else some of these are called, and their names.
    """
    plain = {_plain(each): meant for each, meant in called.items()}
    plain |= {_plain(each): each for each in known}
    wanted = _plain(str(name)[:LONGEST])
    found = get_close_matches(wanted, plain, n=1)
    if not found and wanted.strip("-"):
        begun = [each for each in plain if each.startswith(wanted)]
        found = begun if len(begun) == 1 else []
    return plain[found[0]] if found else None


def did_you_mean(
    name: object,
    known: Iterable[str],
    called: Mapping[str, str] = NOTHING,
    *,
    otherwise: str | None = None,
    quoted: Callable[[str], str] = repr,
) -> str:
    """How the sentence on an unknown name ends.

    Args:
        name: see ``nearest``.
        known: see there.
        called: see there.
        otherwise: how it ends where none is near; None for a list of those that there are, which
            then also follows a guess, as long as it is short.
        quoted: how names are written.
    """
    known = list(known)
    found = nearest(name, known, called)
    every = f"known are {', '.join(known)}"
    if found is None:
        return every if otherwise is None else otherwise
    listed = f" ({every})" if otherwise is None and len(known) <= LISTED else ""
    return f"did you mean {quoted(found)}?{listed}"


def perhaps(name: object, known: Iterable[str], called: Mapping[str, str] = NOTHING) -> str:
    """The same behind a list of those that there are; empty where none is near."""
    found = nearest(name, known, called)
    return "" if found is None else f"; did you mean {found!r}?"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")
