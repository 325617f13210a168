"""Into the public layouts of differential attention: the same model, stored in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config, Weights
from growkit.conversions.rewriting import OnDiffTransformer
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import Family
from growkit.planning.layouts import layout_names, write_layout
from growkit.planning.operation import Change, Option, Row


@dataclass(frozen=True)
class Storing(OnDiffTransformer):
    """A conversion that stores a DIFF Transformer in another layout."""

    name: str
    target: Family
    options: tuple[Option, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def paper(self) -> str:
        """See ``growkit.planning.operation.Operation``."""
        return f"the layout of {self.target.name}"

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``growkit.planning.operation.Operation``."""
        if family is self.target:
            raise InputError(
                f"the source is in the layout of {family.name} already; choose another layout"
            )
        return super().expresses(family, config, options)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        if self.target is DIFF:
            return Change([])
        return Change([write_layout(source, self.target)])


def storings() -> list[Storing]:
    """A conversion into every layout there is."""
    return [Storing(name, family) for name, family in layout_names().items()]
