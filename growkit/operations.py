"""All operations, found by being there: growths in ``growkit.growth``, conversions beside them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import cast

from growkit.conversions.storing import storings
from growkit.errors import InputError
from growkit.planning.operation import Operation
from growkit.registry import members

PACKAGES = {"grow": "growkit.growth", "convert": "growkit.conversions"}
"""By the verb of the command, and of a recipe's step."""


def operations(verb: str) -> dict[str, Operation]:
    """The operations of a verb, by their name on the command line."""
    found = cast("list[Operation]", list(members(PACKAGES[verb], "OPERATION").values()))
    if verb == "convert":
        found += storings()
    return {operation.name: operation for operation in found}


def operation_of(verb: str, name: str) -> Operation:
    """The operation of this name.

    Raises:
        InputError: there is none; lists those that there are.
    """
    known = operations(verb)
    if name not in known:
        kind = "growth method" if verb == "grow" else "conversion to"
        nearest = get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise InputError(f"there is no {kind} {name!r}; {hint}known are {', '.join(sorted(known))}")
    return known[name]
