"""All operations, found by being there: growths in ``growkit.growth``, conversions beside them."""

from __future__ import annotations

from typing import cast

from growkit.conversions.storing import storings
from growkit.errors import InputError
from growkit.names import did_you_mean
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
        InputError: there is none; gives the nearest, or lists those that there are.
    """
    known = operations(verb)
    if name not in known:
        others = {each: other for other in PACKAGES if other != verb for each in operations(other)}
        if name in others:
            raise InputError(f"{name} is not for {verb}; use growkit {others[name]}")
        kind = "growth method" if verb == "grow" else "conversion to"
        raise InputError(f"there is no {kind} {name!r}; {did_you_mean(name, sorted(known))}")
    return known[name]
