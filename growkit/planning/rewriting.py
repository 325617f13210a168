"""Plans that turn a model into one of another family: some tensors change, the rest is kept."""

from collections.abc import Callable, Sequence

from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.families.description import Member
from growkit.families.family import Family
from growkit.families.model import Model
from growkit.planning.plan import Plan, TargetCheck, unused_tensors
from growkit.planning.transforms import Kept, Transform

Special = Callable[[Member, TensorInfo], Transform | None]
"""Maps a tensor of the target and its expected header to its transform; None keeps the tensor of
this name."""


def rewrite(
    source: Model,
    family: Family,
    config: Config,
    special: Special = lambda member, info: None,
    checks: Sequence[TargetCheck] = (),
    apart: str = "",
) -> Plan:
    """Plan a model of a family from a model whose tensors have the same names.

    Args:
        source: the source.
        family: family of the target.
        config: config of the target.
        special: transforms of tensors that change.
        checks: see ``Plan``.
        apart: see ``Plan``.

    Raises:
        InputError: see ``unused_tensors``.
    """
    dropped, duplicates = unused_tensors(source, source.family)
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
    used = {name for transform in transforms.values() for name in transform.sources}
    for name in sorted(source.tensors.keys() - used - dropped.keys()):
        dropped[name] = "the new attention does not use it"
    unused = dropped, duplicates
    return Plan.checked(
        source, family, config, transforms, unused=unused, checks=tuple(checks), apart=apart
    )
