"""Quantised weights to the dense ones that they stand for, and nothing else."""

from collections.abc import Mapping

from growkit.base.errors import InputError
from growkit.base.tensors import Weights
from growkit.families.family import stored_family
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Kept


class DenseWeights(Operation):
    """See the module; every other operation reads quantised weights in the same way."""

    name = "dense-weights"
    paper = "-"

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        if not source.quantised:
            raise InputError(f"{source.where()} is dense already; leave this step out")
        family = stored_family(source)
        made = {name: Kept(name) for name in family.patterns(source.config)}
        unused = unused_tensors(source, family)
        return Change([Plan.checked(source, family, source.config, made, unused=unused)])


OPERATION = DenseWeights()
