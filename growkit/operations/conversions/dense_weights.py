"""Quantised weights, or those of other programs, as dense ones; nothing else changes."""

from collections.abc import Mapping

from growkit.base.errors import InputError
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite


class DenseWeights(Operation):
    """See the module; all other operations read quantised weights in the same way."""

    name = "dense-weights"
    paper = "-"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        plan = rewrite(source, source.family, source.config)
        if not source.quantised and source.stands_alone:
            raise InputError(f"{source.where()} is already dense; leave out this step")
        return Change([plan])


OPERATION = DenseWeights()
