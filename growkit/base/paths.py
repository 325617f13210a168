"""What is left of a machine's paths where others read along: the names at their ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

DIRECTORIES = re.compile(
    r"""(?:^|(?<=[\s('"`=:,]))(?:~|[A-Za-z]:)?[/\\](?=\S)(?:[^\s/\\'"`)]+[/\\])*"""
)
"""What leads to a file on a machine."""

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")

T = TypeVar("T")


def name_of(path: str) -> str:
    """The name of a file or folder, also of one that is called by a link such as ``..``.

    An address such as ``hf://ORG/NAME@COMMIT`` is a name as it is: it leads there from anywhere.
    """
    if ADDRESS.match(path):
        return path
    return re.split(r"[/\\]", os.path.abspath(path))[-1] or "model"


def by_name(found: Mapping[str, T]) -> dict[str, T]:
    """The same by the names of files; of those that share one, the later ones are numbered."""
    named: dict[str, T] = {}
    for path, value in found.items():
        name = name_of(path)
        same = sum(other == name or other.startswith(f"{name} (") for other in named)
        named[f"{name} ({same + 1})" if same else name] = value
    return named


def without_paths(paths: Iterable[str]) -> Callable[[Any], Any]:
    """What takes paths out of every text in a JSON value, and leaves the names at their ends.

    Args:
        paths: folders and files that texts may name; their names may hold blanks.
    """
    leading = set()
    for path in paths:
        if ADDRESS.match(path):
            continue
        for way in (path, os.path.abspath(path), os.path.realpath(path)):
            folder = os.path.dirname(way.rstrip("/"))
            if len(folder) > 1:  # else nothing is to be taken out, or every slash would be
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
