"""Names: suggestions for unknown ones, and the removal of directories before publication."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

LONGEST = 100
"""Number of characters to compare; no known name is longer."""

LISTED = 20
"""Limit for the known names that a message lists after a suggestion."""

NOTHING: Mapping[str, str] = MappingProxyType({})

DIRECTORIES = re.compile(
    r"""(?:^|(?<=[\s('"`=:,]))(?:~?/(?=\S)(?:[^\s/'"`)]+/)*|[A-Za-z]:\\(?:[^\s/\\'"`)]+\\)*)"""
)
"""The directories of a path in a text."""

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")


def nearest(name: object, known: Iterable[str], aliases: Mapping[str, str] = NOTHING) -> str | None:
    """Find the known name that was probably meant; None if none is near.

    Case and the separators between words are ignored. A prefix of a single name is enough.

    Args:
        name: the unknown name.
        known: the known names.
        aliases: other names of some known names.
    """
    plain = {_plain(alias): meant for alias, meant in aliases.items()}
    plain |= {_plain(name): name for name in known}
    wanted = _plain(str(name)[:LONGEST])
    matches = get_close_matches(wanted, plain, n=1)
    if not matches and wanted.strip("-"):
        begun = [key for key in plain if key.startswith(wanted)]
        matches = begun if len(begun) == 1 else []
    return plain[matches[0]] if matches else None


def did_you_mean(
    name: object,
    known: Iterable[str],
    aliases: Mapping[str, str] = NOTHING,
    *,
    otherwise: str | None = None,
    quoted: Callable[[str], str] = repr,
) -> str:
    """Write the end of a message about an unknown name.

    Args:
        name: see ``nearest``.
        known: see ``nearest``.
        aliases: see ``nearest``.
        otherwise: the text if no name is near; None to list all known names, which also follow a
            suggestion if there are few.
        quoted: formats a name.
    """
    known = list(known)
    match = nearest(name, known, aliases)
    every = f"known are {', '.join(known)}"
    if match is None:
        return every if otherwise is None else otherwise
    listed = f" ({every})" if otherwise is None and len(known) <= LISTED else ""
    return f"did you mean {quoted(match)}?{listed}"


def perhaps(name: object, known: Iterable[str], aliases: Mapping[str, str] = NOTHING) -> str:
    """A suggestion to append to a list of all names; empty if none is near."""
    match = nearest(name, known, aliases)
    return "" if match is None else f"; did you mean {match!r}?"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def name_of(path: str) -> str:
    """The name of a file or folder, also of a link such as ``..``.

    An address such as ``hf://ORG/NAME@COMMIT`` is its own name: it leads there from anywhere.
    """
    if ADDRESS.match(path):
        return path
    return os.path.basename(os.path.abspath(path)) or "model"


def by_name(by_path: Mapping[str, str]) -> dict[str, str]:
    """Replace paths by file names, which get numbers if they repeat."""
    named: dict[str, str] = {}
    for path, value in by_path.items():
        name = name_of(path)
        same = sum(other == name or other.startswith(f"{name} (") for other in named)
        named[f"{name} ({same + 1})" if same else name] = value
    return named


def without_paths(paths: Iterable[str]) -> Callable[[Any], Any]:
    """Make a function that removes directories from every text in a JSON value.

    Args:
        paths: folders and files that texts may name; their names may contain spaces.
    """
    leading = set()
    for path in paths:
        if ADDRESS.match(path):
            continue
        for spelling in (path, os.path.abspath(path), os.path.realpath(path)):
            folder = os.path.dirname(spelling.rstrip("/"))
            if len(folder) > 1:  # else every slash would be removed
                leading.add(folder + os.sep)
    longest_first = sorted(leading, key=len, reverse=True)

    def public(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: public(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [public(entry) for entry in value]
        if not isinstance(value, str):
            return value
        for folder in longest_first:
            value = value.replace(folder, os.sep)
        return DIRECTORIES.sub("", value)

    return public


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Format names for a sentence: the first few, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
