"""The more general class to which a conversion takes a model."""

from typing import Any

from growkit.base.errors import InputError
from growkit.model.families.family import Family, families
from growkit.model.families.family_parts import Without
from growkit.model.model import Model
from growkit.planning.plan import Planned
from growkit.planning.rewriting import config_with

_OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")
"""Keys that a class without windows does not know, but of which transformers' caches read some."""


def upgraded(source: Model, conversion: str) -> tuple[Family, dict[str, Any]]:
    """Find the class to which a conversion takes a model (``Family.upgrades``).

    Returns:
        The family of the class, and the model's config as one of the class.

    Raises:
        InputError: no class computes the rest of the model, or the model has a setting that the
            class lacks.
    """
    kind = source.config["model_type"]
    by_kind: dict[str, tuple[Family, Without]] = {}
    for target in families().values():
        by_kind |= {of: (target, rest) for of, rest in target.upgrades.get(conversion, {}).items()}
    if kind not in by_kind:
        before = "; leave out the steps that made it one" if isinstance(source, Planned) else ""
        raise InputError(
            f"no class known to --to {conversion} computes the rest of {source.family.one}, so "
            f"{source.where()} cannot be converted{before}; these can: {', '.join(sorted(by_kind))}"
        )
    target, without = by_kind[kind]
    config = config_with(source, target, without)
    if "layer_types" not in target.defaults:
        config = {key: value for key, value in config.items() if key not in _OF_WINDOWS}
    return target, config
