"""The more general class to which a conversion takes a model."""

from collections.abc import Mapping
from typing import Any

from growkit.base.errors import InputError
from growkit.base.parsing import check_kind
from growkit.model.families.family import Family, families
from growkit.model.families.family_parts import Without
from growkit.model.model import Model
from growkit.planning.plan import Planned

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


def config_with(source: Model, target: Family, without: Without) -> dict[str, Any]:
    """Convert a config to that of a more general class, and write out the old class's defaults.

    Args:
        source: the model.
        target: the family of the more general class.
        without: how the model's class differs from it.

    Raises:
        InputError: the model has a setting that the other class lacks.
    """
    present, complete = source.config, source.complete
    for key, values in without.only.items():
        value = present.get(key, without.assumed.get(key, values[0]))
        if value not in values:
            raise InputError(
                f"config.json in {source.where()}, or its class, has {key} {value!r}, which "
                f"{target.one} cannot have; only one with {' or '.join(map(repr, values))} can "
                "become one"
            )
    unknown = {"auto_map"}
    if "layer_types" not in target.defaults:
        unknown.add("layer_types")  # transformers' caches and masks read them, whatever the class
        kinds = complete.get("layer_types") or []
        check_kind(kinds, [str], f"layer_types in config.json of {source.where()}")
        others = {*kinds} - {"full_attention"}
        if others:
            raise InputError(
                f"config.json in {source.where()} has layers of type {', '.join(sorted(others))}, "
                f"which {target.one} cannot have; only one with full attention can become one"
            )
    config = {key: value for key, value in present.items() if key not in unknown}
    rope = present.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    config |= {k: v for k, v in without.assumed.items() if k not in config and k not in rope}
    config |= {key: complete[key] for key in target.defaults if key in source.family.defaults}
    return config | dict(without.ignored) | {"model_type": target.model_types[0]}
