"""Plans that turn a model into one of another family: some tensors change, the rest is kept."""

from collections.abc import Callable, Mapping
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.model.families.family import Family
from growkit.model.families.family_parts import Member, Without
from growkit.model.model import Model
from growkit.planning.plan import Plan
from growkit.planning.transforms import Kept, Transform

Special = Callable[[Member, TensorInfo], Transform | None]
"""Maps a tensor of the target and its expected header to its transform; None keeps the tensor of
this name."""


def rewrite(
    source: Model,
    family: Family,
    config: Config,
    special: Special = lambda member, info: None,
    **more: Any,
) -> Plan:
    """Plan a model of a family from a model whose tensors have the same names.

    Args:
        source: the source.
        family: family of the target.
        config: config of the target.
        special: transforms of tensors that change.
        **more: further attributes of the plan.

    Raises:
        InputError: see ``growkit.model.model.unused_tensors``.
    """
    sizes = family.sizes(config)
    transforms: dict[str, Transform] = {}
    # Layer by layer, so that tensors that are computed together are written together.
    for member in sorted(
        family.members(config), key=lambda member: -1 if member.layer is None else member.layer
    ):
        known = source.tensors.get(member.name)
        dtype = known.dtype if known else main_dtype(source.tensors)
        info = TensorInfo(member.pattern.shape(sizes), dtype)
        transforms[member.name] = special(member, info) or Kept(member.name)
    unread = "the new attention does not use it"
    return Plan.checked(source, config, transforms, family, unread, **more)


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
        others = {*(complete.get("layer_types") or ())} - {"full_attention"}
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
