"""From sizes to expansions: which coordinates are copied, and where the copies stand.

Whole factors copy whole spaces. Any other size takes copies as they come: the first coordinates
have one more. Members of groups follow what serves them. A space that a norm takes the mean over
has as many whole copies as fit, and zeros behind them. What computes with its number stands where
it computes the same, and copies elsewhere are read by nothing yet.

Copies that stand side by side make one copy of a key-value head serve one query head, and the other
copy another: they get different gradients, and part. Where they are to stay equal, every copy
serves a copy of the whole group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config
from growkit.families.family import Family

if TYPE_CHECKING:
    from growkit.algebra.expansion import Expansion


def placed_copies(
    family: Family,
    config: Config,
    old: Mapping[str, int],
    new: Mapping[str, int],
    *,
    whole_groups: bool = False,
) -> dict[str, Expansion]:
    """The expansion of every axis that grows.

    Args:
        family: of the model.
        config: of the source.
        old: size of every axis in the source.
        new: of every axis that grows, its size in the target, which the class can have.
        whole_groups: whether every copy is to serve copies of all that was served, where there are
            as many.

    Raises:
        InputError: groups have no room for copies of all their members.
    """
    from growkit.algebra.expansion import filled_up, in_blocks, in_places, side_by_side, uneven

    grouped = family.grouped
    complete = family.complete(config)
    normed = {norm.over for norm in family.norms} | {
        tensor.norm.over for tensor in family.tensors if tensor.norm and tensor.when(complete)
    }
    apart = _apart(family, old, new)
    if whole_groups:
        apart |= _in_whole_groups(family, old, new)
    found: dict[str, Expansion] = {}
    for axis in _servants_first(family, old, new):
        size = new.get(axis, old[axis])
        if axis in apart and _servants(family, old, axis):
            found[axis] = _beside(family, old, axis, size, found)
        elif size == old[axis]:
            found[axis] = in_blocks(size, 1)
        elif axis in family.places:
            found[axis] = in_places(old[axis], family.places[axis](old[axis], size))
        elif size % old[axis] == 0:
            copies = side_by_side if axis in grouped else in_blocks
            found[axis] = copies(old[axis], size // old[axis])
        elif axis in normed and axis not in grouped:
            found[axis] = filled_up(old[axis], size)
        else:
            found[axis] = uneven(old[axis], size, groups=axis in grouped)
    return {axis: found[axis] for axis in new}


def _servants(family: Family, old: Mapping[str, int], axis: str) -> list[str]:
    """What serves the groups of an axis in this model, the smallest groups first."""
    return [each for each in family.served.get(axis, ()) if old.get(each)]


def _servants_first(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> list[str]:
    """The axes that grow and what serves them, each behind what serves it."""
    found: dict[str, None] = {}

    def add(axis: str) -> None:
        for each in _servants(family, old, axis):
            add(each)
        found[axis] = None

    for axis in new:
        add(axis)
    return list(found)


def _apart(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes of groups whose members cannot be copied as neighbours.

    Copies of neighbours stand in the group of what serves them if everything in it is copied by
    whole factors.
    """
    uneven = {axis for axis, size in new.items() if size % old[axis]}
    apart = set(uneven)
    for axis in (*family.served, *family.served):  # noise heads are served, and serve
        together = {axis, *_servants(family, old, axis)}
        if together & apart:
            apart |= together
    return apart


def _in_whole_groups(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes whose members must be copied group by group, so that all copies serve the same.

    None if there are not enough members for that.
    """
    served = [axis for axis in family.served if old.get(axis)]
    pairs = [(axis, each) for axis in served for each in _servants(family, old, axis)]
    parting = False
    for axis, serving in pairs:
        members, copies = old[axis] // old[serving], new.get(serving, 0) // old[serving]
        if new.get(axis, old[axis]) % (members * new.get(serving, old[serving])):
            return set()
        parting |= members > 1 and copies > 1
    return {axis for axis, _ in pairs} if parting else set()


def _beside(
    family: Family, old: Mapping[str, int], axis: str, size: int, found: Mapping[str, Expansion]
) -> Expansion:
    """Copies of the members of groups beside copies of what serves them; see ``placed_copies``."""
    from growkit.algebra.expansion import following

    servant = _servants(family, old, axis)[0]
    groups = found[servant]
    if size % len(groups.source):
        raise InputError(
            f"{axis} {size} is no multiple of {servant} {len(groups.source)}, but each of these "
            "serves a whole group; choose a multiple"
        )
    members = old[axis] // old[servant]
    places = size // len(groups.source)
    if places * int(groups.counts.min()) < members:
        raise InputError(
            f"{axis} cannot become {size} with {len(groups.source)} {servant}: a group of them has "
            f"{members} members, of which {places} would find room beside what serves them; "
            f"choose at least {len(groups.source) * members} {axis}, or fewer {servant}"
        )
    return following(groups, old[axis], size)
