"""All operations by name, and steps: operations with their options.

Growths are the modules of ``growkit.growth``, conversions those of ``growkit.conversions``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean, nearest
from growkit.base.registry import members
from growkit.planning.operation import Operation, Value, complete, config_key_aliases

DEFAULT_METHOD = "hypercloning"
"""The growth method that ``growkit grow`` uses unless another is named."""

PACKAGES = {"grow": "growkit.growth", "convert": "growkit.conversions"}
"""The package of each verb's operations."""


def operations(verb: str) -> dict[str, Operation]:
    """The operations of a verb, by their name on the command line."""
    found = cast("list[Operation]", list(members(PACKAGES[verb], "OPERATION").values()))
    for each in members(PACKAGES[verb], "OPERATIONS").values():
        found += cast("Callable[[], list[Operation]]", each)()
    return {operation.name: operation for operation in found}


def suggest_operation(option: str, known: Collection[str]) -> str:
    """Which operations have an option, as what to choose for it; empty if none has.

    Args:
        option: its name, or the config key of the size that it changes.
        known: the options of the operation that lacks it.
    """
    every = {verb: operations(verb).values() for verb in PACKAGES}
    options = [each for found in every.values() for one in found for each in one.options]
    name = config_key_aliases(options).get(option, option)
    if name in known:
        return ""
    ways = []
    for verb, way in (("grow", "the growth method"), ("convert", "the conversion to")):
        named = [one.name for one in every[verb] if name in (each.name for each in one.options)]
        ways += [f"{way} {' or '.join(named)}"] if named else []
    return f"for {name} choose {' or '.join(ways)}" if ways else ""


def operation_of(verb: str, name: str) -> Operation:
    """The operation of this name.

    Raises:
        InputError: there is none; names the nearest, or lists all.
    """
    known = operations(verb)
    if name in known:
        return known[name]
    for other in PACKAGES:
        if name in operations(other):
            raise InputError(f"{name} is not for {verb}; use growkit {other}")
    kind = "growth method" if verb == "grow" else "conversion to"
    meant = did_you_mean(name, sorted(known))
    if nearest(name, known) is None:
        options = {each.name for one in known.values() for each in one.options}
        meant = suggest_operation(nearest(name, options) or "", ()) or meant
    raise InputError(f"there is no {kind} {name!r}; {meant}")


@dataclass(frozen=True, init=False)
class Step:
    """One operation.

    Attributes:
        name: of the operation.
        options: values of some of its options; the rest have defaults.
    """

    verb: ClassVar[str]
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __init__(
        self, name: str, options: Mapping[str, Value] | None = None, **more: Value
    ) -> None:
        """Make a step; options may also be given as keywords.

        Raises:
            InputError: there is no such operation, option or value; lists those there are.
        """
        vars(self).update(name=name, options={**(options or {}), **more})
        complete(self.operation, self.options, suggest_operation)

    @property
    def operation(self) -> Operation:
        """The operation itself."""
        return operation_of(self.verb, self.name)

    def as_dict(self) -> dict[str, Any]:
        """The step as YAML holds it."""
        return {self.verb: self.name, **self.options}


class GrowStep(Step):
    """One growth, e.g. ``GrowStep("hypercloning", hidden="x2", symmetry="keep")``."""

    verb = "grow"


class ConvertStep(Step):
    """One conversion, e.g. ``ConvertStep("dint", gamma="gated")``."""

    verb = "convert"


STEPS: dict[str, type[Step]] = {step.verb: step for step in (GrowStep, ConvertStep)}
