"""Conversion of one DIFF Transformer to another: most tensors are kept, some have transforms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from growkit.base.errors import InputError
from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import variant
from growkit.families.family import Family
from growkit.families.model import Model
from growkit.planning.layouts import layout_names, write_layout
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Check, Plan, unused_tensors
from growkit.planning.transforms import Kept, Transform

Special = Callable[[str, TensorInfo, int | None], Transform | None]
"""Maps a tensor's name, expected header and layer (None outside of the layers) to its transform, or
to None for a tensor that is kept."""


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


def rewrite(
    source: Model,
    config: Config,
    special: Special = lambda name, info, layer: None,
    checks: Sequence[Check] = (),
) -> Plan:
    """Plan a DIFF Transformer with another config.

    Args:
        source: a DIFF Transformer.
        config: config of the target.
        special: transforms of tensors that change.
        checks: checks of targets that are not repeatable.
    """
    dropped, duplicates = unused_tensors(source, DIFF)
    sizes, patterns = DIFF.sizes(config), DIFF.patterns(config)
    made: dict[str, Transform] = {}
    # Layer by layer, so that tensors that are computed together are written together.
    for name, _, layer, _ in sorted(
        DIFF.members(config), key=lambda each: -1 if each.layer is None else each.layer
    ):
        known = source.tensors.get(name)
        dtype = known.dtype if known else main_dtype(source.tensors)
        info = TensorInfo(patterns[name].shape(sizes), dtype)
        made[name] = special(name, info, layer) or Kept(name)
    used = {name for each in made.values() for name in each.sources}
    for name in sorted(source.tensors.keys() - used - dropped.keys()):
        dropped[name] = "the new attention does not use it"
    unused = dropped, duplicates
    return Plan.checked(source, DIFF, config, made, unused=unused, checks=tuple(checks))


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


def operations() -> list[Storing]:
    """One conversion for every layout."""
    known = layout_names().items()
    return [Storing(name, f"the layout of {family.name}", family) for name, family in known]
