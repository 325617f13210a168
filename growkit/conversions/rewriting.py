"""From one DIFF Transformer to another: most tensors as they are, some by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config, TensorInfo, Weights, main_dtype
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import variant
from growkit.families.family import Family
from growkit.planning.plan import Check, Plan, Rule, taken_over, unused_tensors


class OnDiffTransformer:
    """Conversions that begin with a DIFF Transformer; see ``growkit.planning.operation``."""

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``growkit.planning.operation.Operation``."""
        return family is DIFF

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """See ``growkit.planning.operation.Operation``."""
        return options


def rewrite(
    source: Weights,
    config: Config,
    special: Callable[..., Rule | None],
    checks: Sequence[Check] = (),
) -> Plan:
    """Plan a DIFF Transformer of another config.

    Args:
        source: a DIFF Transformer.
        config: of the target.
        special: takes a tensor's name, what is known of it and its layer (None outside of the
            layers), and gives its rule; or None for a tensor that is taken over.
        checks: what must hold of targets that are not repeatable.
    """
    dropped, duplicates = unused_tensors(source, DIFF)
    sizes, patterns = DIFF.sizes(config), DIFF.patterns(config)
    rules: list[Rule] = []
    recomputed_sources: dict[str, str] = {}
    # Layer by layer, so that what is computed together is written together.
    members = sorted(DIFF.members(config), key=lambda m: -1 if m[2] is None else m[2])
    for name, _, layer in members:
        known = source.tensors.get(name)
        dtype = known.dtype if known else main_dtype(source.tensors)
        info = TensorInfo(patterns[name].shape(sizes), dtype)
        rule = special(name, info, layer) or taken_over(name, info)
        rules.append(rule)
        if not rule.transform.holds:
            recomputed_sources |= dict.fromkeys(rule.sources, rule.why)
    used = {name for rule in rules for name in rule.sources}
    for name in source.tensors.keys() - used - dropped.keys():
        dropped[name] = "the new attention has no use for it"
    plan = Plan(config, tuple(rules), {}, dropped, duplicates, recomputed_sources, tuple(checks))
    plan.check(source, patterns, sizes)
    return plan


def refuse(name: str, config: Config, why: str) -> InputError:
    """The error for a model that a conversion is not for."""
    return InputError(f"{variant(DIFF.complete(config))} cannot be converted to {name}: {why}")
