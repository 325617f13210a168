"""Placement of copies: an expansion for every axis that grows.

Whole factors copy whole axes. For any other size, the first coordinates get one copy more than the
rest. There are three exceptions:

- Members of groups (query heads) are placed next to the copies that serve them (key-value heads).
- An axis over which a norm takes its mean gets as many whole copies as fit, and then zeros.
- Coordinates that compute with their index are placed where they compute the same; nothing reads
  the copies in other places yet.

If the copies of query heads are neighbours, copies of a key-value head serve different query heads:
their gradients differ, and they diverge. To keep them equal, each serves copies of the whole group.
"""

from collections.abc import Iterator, Mapping

from growkit.algebra import expansion
from growkit.algebra.expansion import NOTHING, Expansion
from growkit.base.errors import InputError
from growkit.base.lazy import np
from growkit.base.tensors import Config
from growkit.families.description import Norm
from growkit.families.family import Family


def place_copies(
    family: Family,
    config: Config,
    old: Mapping[str, int],
    new: Mapping[str, int],
    *,
    whole_groups: bool = False,
) -> dict[str, Expansion]:
    """Choose the expansion of every axis that grows.

    Args:
        family: the model's family.
        config: the source's config.
        old: size of every axis in the source.
        new: size in the target of every axis that grows; the class must support it.
        whole_groups: whether each copy of a server (a key-value head) serves copies of its whole
            group, if there are enough members.

    Raises:
        InputError: groups have no room for copies of all their members.
    """
    normed = {norm.over for norm in active_norms(family, family.complete(config))}
    by_group = _placed_by_group(family, old, new)
    if whole_groups:
        by_group |= _placed_as_groups(family, old, new)
    found: dict[str, Expansion] = {}

    def place(axis: str) -> None:
        servers = _servers(family, old, axis)
        for each in servers:  # first
            place(each)
        size, grouped = new.get(axis, old[axis]), axis in family.grouped
        if axis in by_group and servers:
            found[axis] = _follow(old, axis, size, servers[0], found[servers[0]])
        elif size != old[axis] and axis in family.places:
            found[axis] = expansion.in_places(old[axis], family.places[axis](old[axis], size))
        elif size % old[axis] and axis in normed and not grouped:
            found[axis] = expansion.filled_up(old[axis], size)
        else:
            found[axis] = expansion.uneven(old[axis], size, groups=grouped)

    for axis in new:
        place(axis)
    return {axis: found[axis] for axis in new}


def check_groups(family: Family, old: Mapping[str, int], made: Mapping[str, Expansion]) -> str:
    """Check that copies of members are served by copies of their own servers.

    Args:
        family: the model's family.
        old: size of every axis in the source.
        made: the expansion of every axis that grows.

    Returns:
        Why copies of servers train separately: they serve different members; empty if they do not.

    Raises:
        InputError: copies of members would be served by copies of other servers.
    """
    for axis, serving in _pairs(family, old):
        if not made.keys() & {axis, serving}:
            continue
        members, groups = (
            made.get(name) or expansion.in_blocks(old[name], 1) for name in (axis, serving)
        )
        _check_multiple(axis, len(members.source), serving, groups)
        by_copy = members.source.reshape(len(groups.source), -1)
        served = by_copy // (old[axis] // old[serving])
        if not ((served == groups.source[:, None]) | (by_copy == NOTHING)).all():
            raise InputError(
                f"copies of {axis} are not next to the copies of {serving} that serve them; grow "
                f"{axis} and {serving} by whole factors"
            )
        if serving in made:
            by_copy = np.sort(by_copy, axis=1)
            first = np.zeros((groups.size, by_copy.shape[1]), np.int64)
            first[groups.source] = by_copy  # of any copy
            if not (first[groups.source] == by_copy).all():
                return f"copies of {serving} serve different {axis}"
    return ""


def active_norms(family: Family, complete: Config) -> Iterator[Norm]:
    """List the norms of a model.

    Args:
        family: the model's family.
        complete: its config, with the class's defaults.
    """
    for tensor in family.tensors:
        if tensor.norm and tensor.when(complete):
            yield tensor.norm
    yield from family.norms


def _servers(family: Family, old: Mapping[str, int], axis: str) -> list[str]:
    """The axes that serve the groups of an axis in this model, the smallest groups first."""
    return [each for each in family.served.get(axis, ()) if old.get(each)]


def _pairs(family: Family, old: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every axis of members in this model, with each axis that serves its groups."""
    axes = (axis for axis in family.served if old.get(axis))
    return [(axis, each) for axis in axes for each in _servers(family, old, axis)]


def _placed_by_group(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes whose copies cannot be neighbours, because not all of them grow by whole factors."""
    found = {axis for axis, size in new.items() if size % old[axis]}
    for axis in (*family.served, *family.served):  # noise heads are served, and serve
        together = {axis, *_servers(family, old, axis)}
        if together & found:
            found |= together
    return found


def _placed_as_groups(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes whose members must be copied group by group, so that all copies serve the same.

    Empty if there are not enough members for that.
    """
    pairs, diverging = _pairs(family, old), False
    for axis, serving in pairs:
        members, copies = old[axis] // old[serving], new.get(serving, 0) // old[serving]
        if new.get(axis, old[axis]) % (members * new.get(serving, old[serving])):
            return set()
        diverging |= members > 1 and copies > 1
    return {axis for axis, _ in pairs} if diverging else set()


def _follow(
    old: Mapping[str, int], axis: str, size: int, server: str, groups: Expansion
) -> Expansion:
    """Place copies of the members of groups next to the copies that serve them."""
    _check_multiple(axis, size, server, groups)
    members, places = old[axis] // old[server], size // len(groups.source)
    if places * int(groups.counts.min()) < members:
        raise InputError(
            f"{axis} cannot become {size} with {len(groups.source)} {server}, which each serve "
            f"{members}; choose at least {len(groups.source) * members} {axis}, or fewer {server}"
        )
    return expansion.following(groups, old[axis], size)


def _check_multiple(axis: str, size: int, serving: str, groups: Expansion) -> None:
    if size % len(groups.source):
        raise InputError(
            f"{size} {axis} are not a multiple of the {len(groups.source)} {serving} that would "
            "serve them; grow both, or correct the family's groups"
        )
