"""The steps of a recipe: operations with their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from growkit.operations import having, operation_of
from growkit.planning.operation import Operation, Value, complete


@dataclass(frozen=True, init=False)
class Step:
    """One operation.

    Attributes:
        name: of the operation.
        options: a value for some of its options; those left out have defaults.
    """

    verb: ClassVar[str]
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __init__(
        self, name: str, options: Mapping[str, Value] | None = None, **more: Value
    ) -> None:
        """Make a step; options may also be given as keywords.

        Raises:
            InputError: there is no such operation, option or value; says which there are.
        """
        vars(self).update(name=name, options={**(options or {}), **more})
        complete(self.operation, self.options, having)

    @property
    def operation(self) -> Operation:
        """What is done."""
        return operation_of(self.verb, self.name)

    @property
    def paper(self) -> str:
        """Name and source of the operation."""
        return f"{self.name}: {self.operation.paper}"

    def as_dict(self) -> dict[str, Any]:
        """The step as it would stand in YAML."""
        return {self.verb: self.name, **self.options}


class GrowStep(Step):
    """One growth, e.g. ``GrowStep("hypercloning", hidden="x2", symmetry="keep")``."""

    verb = "grow"


class ConvertStep(Step):
    """One conversion, e.g. ``ConvertStep("dint", gamma="gated")``."""

    verb = "convert"


STEPS: dict[str, type[Step]] = {step.verb: step for step in (GrowStep, ConvertStep)}
