"""Plans that turn a model into one of another family: some tensors change, the rest is kept."""

from collections.abc import Callable
from typing import Any

from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.model.families.family import Family
from growkit.model.families.family_parts import Member
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
