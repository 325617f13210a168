"""Conversions to the public layouts (``--to motif``), and the base of those between variants."""

from collections.abc import Mapping
from dataclasses import dataclass

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.extras.differential.diff_family import variant
from growkit.extras.differential.layouts import layout_names, write_layout
from growkit.model.families.family import Family
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation


class OnDiffTransformer(Operation):
    """A conversion whose source is a DIFF Transformer."""

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``Operation``."""
        return family is DIFF

    def with_noise_heads(self, source: Model, problem: str, remedy: str = "") -> Config:
        """Complete the config of a model, which must have noise heads.

        Args:
            source: the model.
            problem: the reason to refuse a model without noise heads, for the message.
            remedy: how to add some, for the message; by default by DIFF.

        Raises:
            InputError: the model has no noise heads.
        """
        diff = DIFF.complete(source.config)
        if not diff["num_noise_heads"]:
            remedy = remedy or f"convert it --to diff first, and then --to {self.name}"
            raise refuse(self.name, diff, f"{problem}; {remedy}")
        return diff


def refuse(name: str, config: Config, why: str) -> InputError:
    """The error for a model that a conversion does not accept."""
    return InputError(f"{variant(DIFF.complete(config))} cannot be converted to {name}: {why}")


@dataclass(frozen=True)
class Storing(OnDiffTransformer):
    """A conversion that stores a DIFF Transformer in another public layout."""

    name: str
    paper: str
    target: Family

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``Operation``."""
        if family is self.target:
            raise InputError(
                f"the source is in the layout of {family.name} already; choose another layout"
            )
        return super().expresses(family, config, options)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        return Change([] if self.target is DIFF else [write_layout(source, self.target)])


def conversions_to_layouts() -> list[Storing]:
    """One conversion for every layout."""
    known = layout_names().items()
    return [Storing(name, f"the layout of {family.name}", family) for name, family in known]


OPERATION = conversions_to_layouts
