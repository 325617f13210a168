"""All operations, found by being there: growths in ``growkit.growth``, conversions beside them."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean, nearest
from growkit.base.registry import members
from growkit.conversions.storing import storings
from growkit.planning.operation import Operation, config_key_aliases

DEFAULT_METHOD = "hypercloning"
"""The method of ``growkit grow`` that need not be named."""

PACKAGES = {"grow": "growkit.growth", "convert": "growkit.conversions"}
"""By the verb of the command, and of a recipe's step."""


def operations(verb: str) -> dict[str, Operation]:
    """The operations of a verb, by their name on the command line."""
    found = cast("list[Operation]", list(members(PACKAGES[verb], "OPERATION").values()))
    if verb == "convert":
        found += storings()
    return {operation.name: operation for operation in found}


def having(option: str, besides: Collection[str]) -> str:
    """Which operations have an option, as what to choose for it; empty if none has.

    Args:
        option: its name, or what configs call the size that it changes.
        besides: the options that there are where it is not one.
    """
    every = {verb: operations(verb).values() for verb in PACKAGES}
    options = [each for known in every.values() for one in known for each in one.options]
    name = config_key_aliases(options).get(option, option)
    if name in besides:
        return ""
    ways = {"grow": "the growth method", "convert": "the conversion to"}
    told = []
    for verb, known in every.items():
        found = [one.name for one in known if name in (each.name for each in one.options)]
        told += [f"{ways[verb]} {' or '.join(found)}"] if found else []
    return f"for {name} choose {' or '.join(told)}" if told else ""


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
        meant = did_you_mean(name, sorted(known))
        if nearest(name, known) is None:
            options = {each.name for other in known.values() for each in other.options}
            meant = having(nearest(name, options) or "", ()) or meant
        raise InputError(f"there is no {kind} {name!r}; {meant}")
    return known[name]
