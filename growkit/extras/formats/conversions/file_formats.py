"""Conversions to the files of other programs: tensors are arranged anew, and no number changes.

Each format that growkit writes (``Format.name``) is one conversion.
"""

from collections.abc import Mapping, Sequence

from growkit.base.errors import InputError
from growkit.model.checkpoint.format import Format, formats
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite


class InFormat(Operation):
    """The same model in the files of a format; see ``Operation``."""

    paper = "-"

    def __init__(self, file_format: Format) -> None:
        self.file_format, self.name = file_format, file_format.name

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``.

        Raises:
            InputError: the format does not hold models of this type.
        """
        assert self.file_format
        kind, models = source.config["model_type"], self.file_format.models
        if models and kind not in models:
            raise InputError(
                f"{source.where()} is of type {kind}, and growkit writes files of "
                f"{self.file_format.title} for {', '.join(sorted(models))}; choose another "
                "one, or convert it with a program that knows it, and verify that"
            )
        return Change([rewrite(source, source.family, source.config)])


def conversions_to_formats() -> Sequence[Operation]:
    """The conversion to each format."""
    return [InFormat(one) for one in formats() if one.name]


OPERATION = conversions_to_formats
