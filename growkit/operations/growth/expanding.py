"""From the sizes of axes to the plan of a growth: an expansion for each axis, and the transforms.

A norm takes the mean over an axis. Whole copies do not change the mean. Zeros reduce it, so normed
numbers become larger: the weights of the norm compensate for that, and eps (a key of the config),
which the class adds to the mean, shrinks in proportion. That rounds the weights of norms once,
which only the promise *bounded* allows. Uneven copies change a mean in a way that depends on the
input, which no weight can compensate for. A class may also multiply tensors by a number that
depends on sizes.

Whole factors copy whole axes. For any other size, the first coordinates get one copy more than the
rest. There are three exceptions:

- Members of groups (query heads) are placed next to the copies that serve them (key-value heads).
- An axis over which a norm takes its mean gets as many whole copies as fit, and then zeros.
- Coordinates that compute with their index are placed where they compute the same; nothing reads
  the copies in other places yet.

If the copies of query heads are neighbours, copies of a key-value head serve different query heads:
their gradients differ, and they diverge. To keep them equal, each serves copies of the whole group.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from growkit.algebra import expansion
from growkit.algebra.expansion import NOTHING, Expansion, IndexMap
from growkit.algebra.splits import Shares
from growkit.base.axes import Dimension, Order, Pattern, Role
from growkit.base.errors import InputError
from growkit.base.lazy import np
from growkit.base.tensors import Config
from growkit.model.families.family import Family
from growkit.model.families.family_parts import Member, Norm, Tensor
from growkit.model.model import Model
from growkit.planning.plan import Plan
from growkit.planning.transforms import Kept, Mapped, Rounded, Transform

BOUNDED = "--promise bounded"
"""The option that allows tensors to be rounded once."""


def expand(
    source: Model,
    sizes: Mapping[str, int],
    expansions: Callable[[], Mapping[str, Expansion]],
    shares: Shares,
    *,
    rounding: bool = False,
    resets: bool = False,
) -> Plan:
    """Plan a growth.

    Args:
        source: the checkpoint.
        sizes: new size of every axis that grows.
        expansions: makes the expansion of each of these axes; called once the sizes are known to be
            possible.
        shares: how weights are split among copies.
        rounding: whether tensors may be rounded once if there is no exact way.
        resets: whether an optimizer's moments restart for copies.

    Raises:
        InputError: the checkpoint does not fit its config, or the model class does not support
            these sizes or cannot compute the same with these expansions.
    """
    family, old = source.family, source.sizes
    new = {**old, **sizes}
    for axis, why in family.fixed(source.complete).items():
        if new[axis] != old[axis]:
            raise InputError(f"{axis} of the {family.name} model in {source.where()} {why}")
    config = family.resized(source.config, new)
    by_axis = expansions()
    assert {axis: len(expanded.source) for axis, expanded in by_axis.items()} == dict(sizes)
    growth = _Growth(family, old, new, by_axis, shares, rounding, resets)
    diverging = check_groups(source, by_axis)
    config, lost = growth.adjust_eps(source.config, config)
    grown = {
        member.name: growth.transform(member, of)
        for member, of in growth.members(source.config, config)
    }
    copies = {axis: int(expanded.counts.max(initial=0)) for axis, expanded in by_axis.items()}
    return Plan.checked(source, config, grown, copies=copies, divergence=diverging, lost=lost)


@dataclass(frozen=True)
class _Growth:
    """The rules of one growth.

    Attributes:
        family: the model's family.
        old: size of every axis in the source.
        new: size of every axis in the target.
        expansions: the expansion of every axis that grows.
        shares: see ``expand``.
        rounding: see ``expand``.
        resets: see ``expand``.
        known: cache of index maps, which are the same in all layers.
    """

    family: Family
    old: Mapping[str, int]
    new: Mapping[str, int]
    expansions: Mapping[str, Expansion]
    shares: Shares
    rounding: bool
    resets: bool
    known: dict[tuple[Dimension, Order | None, bool], IndexMap] = field(default_factory=dict)

    def members(self, source: Config, target: Config) -> Iterator[tuple[Member, str]]:
        """List every tensor of the target, with its source's name.

        If every head has its own tensor, every copy of a head has one too.
        """
        before = {(e.tensor.name, e.layer, e.number): e.name for e in self.family.members(source)}
        for member in self.family.members(target):
            _, tensor, layer, number = member
            grown = self.expansions.get(tensor.counts or "")
            if grown:
                number = int(grown.source[number])
            yield member, before[tensor.name, layer, number]

    def adjust_eps(self, source: Config, config: Config) -> tuple[Config, str]:
        """Scale eps of every norm in the target's config in proportion to the mean.

        Args:
            source: the source's config.
            config: the target's config, with its sizes.

        Returns:
            The config, and what is lost where norms whose mean stays share the key; else nothing.

        Raises:
            InputError: the class adds a fixed eps, or norms that share a key need different values.
        """
        before = self.family.complete(source)
        shrunk: dict[str, dict[float, dict[str, None]]] = {}
        for norm in active_norms(self.family, before):
            mean = self._mean(norm)
            if norm.eps is None and mean != 1:
                raise self._refusal(norm.over, "and their class adds a fixed eps to the mean")
            if norm.eps is not None:
                shrunk.setdefault(norm.eps, {}).setdefault(mean, {})[norm.over] = None
        changed: Config = {}
        lost = []
        for key, means in shrunk.items():
            # Where nothing grows, eps matters little, unless a norm reads numbers near zero, as one
            # without a weight may, which reads a difference between heads.
            near_zero = {norm.over for norm in self.family.norms}
            small = near_zero.isdisjoint(means.get(1.0, ()))
            still = means.pop(1.0, None) if self.rounding and len(means) == 2 and small else None
            if len(means) > 1:
                why = f"and {key} serves norms over both, whose means change differently"
                why += (
                    "; convert --to diff-transformer gives each a key" if self.family.form else ""
                )
                raise self._refusal(" and ".join(chain(*means.values())), why)
            (mean,) = means
            if mean == 1:
                continue
            if type(before[key]) not in (int, float):
                raise InputError(f"config.json has {key} {before[key]!r}; a number was expected")
            changed[key] = before[key] * mean
            if still:
                norms, same = " and ".join(still), " and ".join(means[mean])
                lost.append(f"{key} of norms over {norms} times {mean:.6g}, as over {same}")
        if not changed:
            return config, ""
        config = config | changed
        # Keep values that the class would otherwise derive from the changed keys.
        after = self.family.complete(config)
        derived = {k: before[k] for k in self.family.defaults if before[k] != after[k]}
        return config | {k: v for k, v in derived.items() if k not in config}, "; ".join(lost)

    def transform(self, member: Member, of: str) -> Transform:
        """Make the transform of a tensor."""
        tensor, pattern = member.tensor, member.pattern
        factor, rounds = self._factor(tensor)
        if not rounds and all(
            dimension.axes.isdisjoint(self.expansions) for dimension in pattern.dimensions
        ):
            return Kept(of, factor)
        why = ", ".join(
            f"{verb} {axis} " + (f"×{n}" if n else f"{self.old[axis]} → {self.new[axis]}")
            for role, verb in ((Role.WRITTEN, "repeat"), (Role.READ, "split"))
            for axis in sorted(pattern.axes(role) & self.expansions.keys())
            for n in [self.expansions[axis].copies]
        )
        # If the class adds an offset to the tensor, its parts would be parts of another number, so
        # whole copies are read instead, as many as the factor.
        wholes = int(factor) if tensor.offset and not rounds else None
        if wholes is None and (factor != 1 or rounds):
            why += f", times {factor:.6g}" if factor != 1 else ""
            why += ", rounded once" if rounds else ""
        return (Rounded if rounds else Mapped)(
            of,
            partial(self._maps, tensor, wholes),
            why,
            member.canonical,
            self.shares,
            factor if wholes is None else 1.0,
            offset=tensor.offset,
            resets=self.resets,
        )

    def _factor(self, tensor: Tensor) -> tuple[float, bool]:
        """The factor of a tensor, and whether multiplying rounds.

        Raises:
            InputError: multiplying would round and must not, or no factor keeps the mean.
        """
        factor = math.sqrt(self._mean(tensor.norm)) if tensor.norm else 1.0
        if tensor.scale:
            factor *= tensor.scale(self.old) / tensor.scale(self.new)
        read = Pattern.parse(tensor.pattern).axes(Role.READ) & self.expansions.keys()
        copies = math.prod(int(self.expansions[axis].counts.min()) for axis in read)
        by_two = math.frexp(factor)[0] == 0.5
        fits = not tensor.offset or 1 <= factor <= copies
        if self.rounding or (by_two and fits):
            return factor, not (by_two and fits)
        grows = " and ".join(sorted(axis for axis in self.expansions if axis in tensor.pattern))
        adds = f", to which its class adds {tensor.offset:g}," if by_two else ""
        how = "whole copies" if by_two else "powers of four"
        if not by_two and not tensor.scale:
            axis = tensor.norm.over if tensor.norm else ""
            old, new = self.old[axis], self.new[axis]
            near = [str(size) for size in (new // old * old, (new // old + 1) * old) if size > old]
            how += f", by whole copies (to {' or '.join(near)})"
        raise InputError(
            f"{tensor.name} of {self.family.one}{adds} would be multiplied by "
            f"{factor:.6g}, which rounds; {grows} can grow by {how}, or as asked with {BOUNDED}"
        )

    def _mean(self, norm: Norm) -> float:
        """The ratio of a norm's mean square in the target to that in the source."""
        grown = self.expansions.get(norm.over)
        if grown is None or grown.copies:
            return 1.0
        if grown.counts.min() != grown.counts.max():
            raise self._refusal(norm.over, "which uneven copies change")
        if norm.centred:
            raise self._refusal(norm.over, "and subtract the mean, which zeros change")
        return float(grown.counts.sum()) / len(grown.source)

    def _refusal(self, axis: str, why: str) -> InputError:
        return InputError(
            f"{axis} cannot grow like this: norms of {self.family.one} take a mean over "
            f"it, {why}; choose whole copies, or leave its size as it is"
        )

    def _maps(self, tensor: Tensor, wholes: int | None) -> tuple[IndexMap, ...]:
        maps = []
        for number, dimension in enumerate(Pattern.parse(tensor.pattern).dimensions):
            order, weighs = tensor.order if number == 0 else None, tensor.norm is not None
            key = dimension, order, weighs
            if key not in self.known:
                self.known[key] = expansion.index_map(
                    dimension,
                    self.old,
                    self.expansions,
                    (order(self.old), order(self.new)) if order else None,
                    weighs=weighs,
                )
            maps.append(self.known[key])
        return tuple(maps if wholes is None else [mapped.in_wholes(wholes) for mapped in maps])


# Placement of copies


def place_copies(
    source: Model, new: Mapping[str, int], *, whole_groups: bool = False
) -> dict[str, Expansion]:
    """Choose the expansion of every axis that grows.

    Args:
        source: the model.
        new: size in the target of every axis that grows; the class must support it.
        whole_groups: whether each copy of a server (a key-value head) serves copies of its whole
            group, if there are enough members.

    Raises:
        InputError: groups have no room for copies of all their members.
    """
    family, old = source.family, source.sizes
    normed = {norm.over for norm in active_norms(family, source.complete)}
    by_group = _placed_by_group(family, old, new)
    if whole_groups:
        by_group |= _placed_as_groups(family, old, new)
    placed: dict[str, Expansion] = {}

    def place(axis: str) -> None:
        servers = _servers(family, old, axis)
        for server in servers:  # first
            place(server)
        size, grouped = new.get(axis, old[axis]), axis in family.grouped
        if axis in by_group and servers:
            placed[axis] = _follow(old, axis, size, servers[0], placed[servers[0]])
        elif size != old[axis] and axis in family.places:
            placed[axis] = expansion.in_places(old[axis], family.places[axis](old[axis], size))
        elif size % old[axis] and axis in normed and not grouped:
            placed[axis] = expansion.filled_up(old[axis], size)
        else:
            placed[axis] = expansion.uneven(old[axis], size, groups=grouped)

    for axis in new:
        place(axis)
    return {axis: placed[axis] for axis in new}


def check_groups(source: Model, expansions: Mapping[str, Expansion]) -> str:
    """Check that copies of members are served by copies of their own servers.

    Args:
        source: the model.
        expansions: the expansion of every axis that grows.

    Returns:
        Why copies of servers train separately: they serve different members; empty if they do not.

    Raises:
        InputError: copies of members would be served by copies of other servers.
    """
    old = source.sizes
    for axis, serving in _pairs(source.family, old):
        if not expansions.keys() & {axis, serving}:
            continue
        members, groups = (
            expansions.get(name) or expansion.in_blocks(old[name], 1) for name in (axis, serving)
        )
        _check_multiple(axis, len(members.source), serving, groups)
        by_copy = members.source.reshape(len(groups.source), -1)
        served = by_copy // (old[axis] // old[serving])
        if not ((served == groups.source[:, None]) | (by_copy == NOTHING)).all():
            raise InputError(
                f"copies of {axis} are not next to the copies of {serving} that serve them; grow "
                f"{axis} and {serving} by whole factors"
            )
        if serving in expansions:
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
    return [server for server in family.served.get(axis, ()) if old.get(server)]


def _pairs(family: Family, old: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every axis of members in this model, with each axis that serves its groups."""
    axes = (axis for axis in family.served if old.get(axis))
    return [(axis, server) for axis in axes for server in _servers(family, old, axis)]


def _placed_by_group(family: Family, old: Mapping[str, int], new: Mapping[str, int]) -> set[str]:
    """The axes whose copies cannot be neighbours, because not all of them grow by whole factors."""
    axes = {axis for axis, size in new.items() if size % old[axis]}
    for axis in (*family.served, *family.served):  # noise heads are served, and serve
        together = {axis, *_servers(family, old, axis)}
        if together & axes:
            axes |= together
    return axes


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
