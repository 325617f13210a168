"""Dequantisation: quantised weights are stored as dense ones, and nothing else changes."""

from collections.abc import Mapping

from growkit.base.errors import InputError
from growkit.families.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Kept


class DenseWeights(Operation):
    """See the module; all other operations read quantised weights in the same way."""

    name = "dense-weights"
    paper = "-"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        family = source.family
        transforms = {name: Kept(name) for name in family.patterns(source.config)}
        unused = unused_tensors(source, family)
        if not source.quantised:
            raise InputError(f"{source.where()} is already dense; leave out this step")
        return Change([Plan.checked(source, family, source.config, transforms, unused=unused)])


OPERATION = DenseWeights()
