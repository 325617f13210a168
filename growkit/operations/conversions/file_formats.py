"""Conversions to the files of other programs: tensors are arranged anew, and no number changes.

Each format that growkit writes (``Format.name``) is one conversion.
"""

from collections.abc import Mapping, Sequence

from growkit.checkpoint.format import Format, formats
from growkit.families.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite


class InFormat(Operation):
    """The same model in the files of a format; see ``Operation``."""

    paper = "-"

    def __init__(self, file_format: Format) -> None:
        self.file_format, self.name = file_format, file_format.name

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        return Change([rewrite(source, source.family, source.config)])


def make_operations() -> Sequence[Operation]:
    """The conversion to each format."""
    return [InFormat(one) for one in formats() if one.name]
