"""Names: the known one that was meant, and what may be published of a path."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

LONGEST = 100
"""Characters of a name that are compared; no name is longer."""

LISTED = 20
"""Most known names that a sentence lists after a guess."""

NOTHING: Mapping[str, str] = MappingProxyType({})

DIRECTORIES = re.compile(
    r"""(?:^|(?<=[\s('"`=:,]))(?:~|[A-Za-z]:)?[/\\](?=\S)(?:[^\s/\\'"`)]+[/\\])*"""
)
"""The directories of a path in a text."""

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")

T = TypeVar("T")


def nearest(name: object, known: Iterable[str], aliases: Mapping[str, str] = NOTHING) -> str | None:
    """The known name that was probably meant; None if none is near.

    Capital letters, and the signs between words, do not count. The beginning of a single name is
    enough.

    Args:
        name: the unknown one.
        known: the names there are.
        aliases: other names of some of these.
    """
    plain = {_plain(each): meant for each, meant in aliases.items()}
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
    aliases: Mapping[str, str] = NOTHING,
    *,
    otherwise: str | None = None,
    quoted: Callable[[str], str] = repr,
) -> str:
    """The end of a sentence on an unknown name.

    Args:
        name: see ``nearest``.
        known: see there.
        aliases: see there.
        otherwise: the end if no name is near; None for a list of all names, which then also follows
            a guess, as long as it is short.
        quoted: how names are written.
    """
    known = list(known)
    found = nearest(name, known, aliases)
    every = f"known are {', '.join(known)}"
    if found is None:
        return every if otherwise is None else otherwise
    listed = f" ({every})" if otherwise is None and len(known) <= LISTED else ""
    return f"did you mean {quoted(found)}?{listed}"


def perhaps(name: object, known: Iterable[str], aliases: Mapping[str, str] = NOTHING) -> str:
    """A guess to follow a list of all names; empty if none is near."""
    found = nearest(name, known, aliases)
    return "" if found is None else f"; did you mean {found!r}?"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def name_of(path: str) -> str:
    """The name of a file or folder, also of a link such as ``..``.

    An address such as ``hf://ORG/NAME@COMMIT`` is its own name: it leads there from anywhere.
    """
    if ADDRESS.match(path):
        return path
    return re.split(r"[/\\]", os.path.abspath(path))[-1] or "model"


def by_name(found: Mapping[str, T]) -> dict[str, T]:
    """The same by the names of files, with a number where a name is taken."""
    named: dict[str, T] = {}
    for path, value in found.items():
        name = name_of(path)
        same = sum(other == name or other.startswith(f"{name} (") for other in named)
        named[f"{name} ({same + 1})" if same else name] = value
    return named


def without_paths(paths: Iterable[str]) -> Callable[[Any], Any]:
    """A function that takes the directories out of every text in a JSON value.

    Args:
        paths: folders and files that texts may name; their names may hold blanks.
    """
    leading = set()
    for path in paths:
        if ADDRESS.match(path):
            continue
        for way in (path, os.path.abspath(path), os.path.realpath(path)):
            folder = os.path.dirname(way.rstrip("/"))
            if len(folder) > 1:  # else every slash would go
                leading.add(folder + os.sep)
    longest_first = sorted(leading, key=len, reverse=True)

    def public(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: public(each) for key, each in value.items()}
        if isinstance(value, list):
            return [public(each) for each in value]
        if not isinstance(value, str):
            return value
        for folder in longest_first:
            value = value.replace(folder, os.sep)
        return DIRECTORIES.sub("", value)

    return public
