"""From expansions, one for each space that grows, to the rules of a plan.

Whatever a method wants of a space (whole copies, uneven ones, zeros, places chosen by hand) is an
expansion, and from there on one law. What a model class makes of positions and of means is held
against the expansions first: heads must find the copies of what serves them in their group, and a
norm must find a mean that it can be told of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from growkit.algebra.axes import Dimension, Order, Pattern, Role
from growkit.algebra.shares import Shares
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import TORCH_NAMES, Config, TensorInfo, Weights
from growkit.families.description import Norm
from growkit.families.description import Tensor as Described
from growkit.families.family import Family
from growkit.planning.plan import Plan, Rule, unused_tensors
from growkit.planning.transforms import Kept, Mapped, Slices

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import Expansion, IndexMap
    from growkit.algebra.law import Rows
    from growkit.planning.updates import Update


@dataclass(frozen=True, eq=False)
class Rounded(Mapped):
    """A tensor as ``Mapped`` makes it, times any number: every element is rounded once.

    It does not give its source back, bit for bit; making it again gives the same bits.
    """

    holds = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        import torch

        from growkit.algebra.law import grow

        dtype: torch.dtype = getattr(torch, TORCH_NAMES[source.tensors[self.source].dtype])
        wide = dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32

        def read(rows: slice, columns: slice | None = None) -> Tensor:
            return source.read(self.source, rows, columns).to(wide) + self.offset

        grown = grow(read, self.maps, self.name, self.shares, where)
        return (grown.double() * self.factor - self.offset).to(dtype)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return super().update(before).because("it is rounded")

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Nothing comes back bit for bit."""
        return None


def expand(
    source: Weights,
    family: Family,
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
        family: of the source, in the form that its tensors have.
        sizes: new size of every axis that grows.
        expansions: gives the expansion of each of these axes, once their sizes are known to be
            possible.
        shares: how weights are split over copies.
        rounding: whether tensors may be rounded once, where nothing exact is to be had; the plan
            then has them as ``recomputed_sources``.
        resets: whether an optimizer's moments of copies begin anew.

    Raises:
        InputError: the checkpoint is not what its config says, or the model class cannot have
            these sizes, or cannot compute the same with these expansions; says why.
    """
    dropped, duplicates = unused_tensors(source, family)
    old = family.sizes(source.config)
    new = {**old, **sizes}
    for axis, why in family.fixed(family.complete(source.config)).items():
        if new[axis] != old[axis]:
            raise InputError(f"{axis} of the {family.name} model in {source.where()} {why}")
    config = family.resized(source.config, new)
    made = expansions()
    assert {axis: len(each.source) for axis, each in made.items()} == dict(sizes)
    _check_groups(family, old, made)
    factors = Factors(family, old, new, made, rounding=rounding)
    config = factors.config(source.config, config)
    growing = _Growing(old, new, made, shares, resets=resets)
    rules = tuple(
        growing.rule(name, of, tensor, source.tensors[of], *factors.of(tensor))
        for name, of, tensor in _members(family, source.config, config, made)
    )
    plan = Plan(
        config=config,
        rules=rules,
        copies={axis: int(each.counts.max(initial=0)) for axis, each in made.items()},
        dropped=dropped,
        duplicates=duplicates,
        apart=_serving_apart(family, old, made),
    )
    plan.check(source, family.patterns(config), family.sizes(config))
    return plan


def _members(
    family: Family, source: Config, target: Config, made: Mapping[str, Expansion]
) -> Iterator[tuple[str, str, Described]]:
    """Name of every tensor of the target, that of the source's which it is made of, and what it is.

    What has a tensor for each head has one for each copy.
    """
    before: dict[tuple[str, int | None], list[str]] = {}
    for name, tensor, layer in family.members(source):
        before.setdefault((tensor.name, layer), []).append(name)
    seen: Counter[tuple[str, int | None]] = Counter()
    for name, tensor, layer in family.members(target):
        number = seen[tensor.name, layer]
        seen[tensor.name, layer] += 1
        axis = tensor.counts
        if axis and axis in made:
            number = int(made[axis].source[number])
        yield name, before[tensor.name, layer][number], tensor


def _check_groups(family: Family, old: Mapping[str, int], made: Mapping[str, Expansion]) -> None:
    """Refuse heads whose copies would be served by copies of what did not serve them.

    Raises:
        InputError: names the first one.
    """
    from growkit.algebra.expansion import NOTHING, in_blocks

    for axis, all_serving in family.served.items():
        for serving in all_serving:
            if not (made.keys() & {axis, serving} and old.get(axis) and old.get(serving)):
                continue
            members, groups = (
                made.get(each) or in_blocks(old[each], 1) for each in (axis, serving)
            )
            each = len(members.source) // len(groups.source)
            if each * len(groups.source) != len(members.source):
                raise InputError(
                    f"{axis} {len(members.source)} is no multiple of {serving} "
                    f"{len(groups.source)}, but each of these serves a whole group; choose a "
                    "multiple"
                )
            served = groups.source.repeat(each)
            right = members.source // (old[axis] // old[serving]) == served
            for place in (~right & (members.source != NOTHING)).nonzero()[0][:1].tolist():
                copied = int(members.source[place])
                raise InputError(
                    f"number {place} of the grown {axis} is a copy of {copied}, which number "
                    f"{copied // (old[axis] // old[serving])} of {serving} serves, but would be "
                    f"served by a copy of {served[place]}; place copies beside what serves them"
                )


def _serving_apart(family: Family, old: Mapping[str, int], made: Mapping[str, Expansion]) -> str:
    """KV-head copies that serve different query heads, so that they train apart."""
    import numpy as np

    from growkit.algebra.expansion import in_blocks

    for axis, all_serving in family.served.items():
        for serving in all_serving:
            if serving not in made or not old.get(axis):
                continue
            groups, members = made[serving], made.get(axis) or in_blocks(old[axis], 1)
            each = len(members.source) // len(groups.source)
            served = np.sort(members.source.reshape(-1, each), axis=1)
            first = np.zeros((groups.size, each), np.int64)
            first[groups.source] = served  # of any copy
            if not (first[groups.source] == served).all():
                return f"copies of {serving} serve different {axis}"
    return ""


class _Growing:
    """The index maps of a growth, each made once, when it is needed: layers are alike."""

    def __init__(
        self,
        old: Mapping[str, int],
        new: Mapping[str, int],
        expansions: Mapping[str, Expansion],
        shares: Shares,
        *,
        resets: bool,
    ) -> None:
        self._old, self._new = old, new
        self._expansions, self._shares, self._resets = expansions, shares, resets
        self._made: dict[tuple[Dimension, Order | None, bool], IndexMap] = {}

    def rule(
        self, name: str, of: str, tensor: Described, info: TensorInfo, factor: float, rounds: bool
    ) -> Rule:
        """How a tensor is made of another, what that is multiplied by, and whether it rounds."""
        pattern = Pattern.parse(tensor.pattern)
        grown = TensorInfo(pattern.shape(self._new), info.dtype)
        kept = all(each.axes.isdisjoint(self._expansions) for each in pattern.dimensions)
        if kept and not rounds:
            return Rule(name, grown, Kept(of, factor) if factor != 1 else Kept(of))
        maps = partial(self._maps, tensor)
        why = self._why(pattern)
        times = f", times {factor:.6g}" if factor != 1 else ""
        shares, resets = self._shares, self._resets
        if rounds:
            why += f"{times}, rounded once"
            rounded = Rounded(
                of, maps, why, name, shares, factor, offset=tensor.offset, resets=resets
            )
            return Rule(name, grown, rounded)
        if tensor.offset:
            wholes = partial(self._in_wholes, tensor, int(factor))
            made = Mapped(of, wholes, why, name, shares, offset=tensor.offset, resets=resets)
            return Rule(name, grown, made)
        copied = Mapped(of, maps, why + times, name, shares, factor, resets=resets)
        return Rule(name, grown, copied)

    def _in_wholes(self, tensor: Described, count: int) -> tuple[IndexMap, ...]:
        """Of a tensor to which something is added, parts would be another number's parts."""
        return tuple(each.in_wholes(count) for each in self._maps(tensor))

    def _maps(self, tensor: Described) -> tuple[IndexMap, ...]:
        first, *others = Pattern.parse(tensor.pattern).dimensions
        weighs = tensor.norm is not None
        mapped = self._map(first, tensor.order, weighs)
        return (mapped, *(self._map(each, None, weighs) for each in others))

    def _map(self, dimension: Dimension, order: Order | None, weighs: bool) -> IndexMap:
        from growkit.algebra.expansion import index_map

        if (dimension, order, weighs) not in self._made:
            orders = (order(self._old), order(self._new)) if order else None
            self._made[dimension, order, weighs] = index_map(
                dimension,
                self._old,
                self._expansions,
                orders,
                weighs=weighs,
                uneven=self._shares.uneven,
            )
        return self._made[dimension, order, weighs]

    def _why(self, pattern: Pattern) -> str:
        """What happens to a tensor, in words."""
        return ", ".join(
            f"{verb} {axis} {self._growth(axis)}"
            for role, verb in ((Role.WRITTEN, "repeat"), (Role.READ, "split"))
            for axis in sorted(pattern.axes(role) & self._expansions.keys())
        )

    def _growth(self, axis: str) -> str:
        copies = self._expansions[axis].copies
        return f"×{copies}" if copies else f"{self._old[axis]} → {self._new[axis]}"


BOUNDED = "--promise bounded"
"""How people allow that tensors are rounded once."""


class Factors:
    """The factors of a growth.

    Args:
        family: of the model.
        old: size of every axis in the source.
        new: likewise in the target.
        expansions: of every axis that grows.
        rounding: whether tensors may be rounded once.
    """

    def __init__(
        self,
        family: Family,
        old: Mapping[str, int],
        new: Mapping[str, int],
        expansions: Mapping[str, Expansion],
        *,
        rounding: bool = False,
    ) -> None:
        self._family = family
        self._old, self._new, self._expansions = old, new, expansions
        self._rounding = rounding

    def of(self, tensor: Described) -> tuple[float, bool]:
        """What a tensor is multiplied by, and whether that rounds.

        Raises:
            InputError: it would round, but must not; or there is no such number.
        """
        factor = math.sqrt(self._mean(tensor.norm)) if tensor.norm else 1.0
        if tensor.scale:
            factor *= tensor.scale(self._old) / tensor.scale(self._new)
        by_two = math.frexp(factor)[0] == 0.5
        fits = not tensor.offset or 1 <= factor <= self._copies_read(tensor)
        if self._rounding or (by_two and fits):
            return factor, not (by_two and fits)
        grows = self._grows(tensor)
        what = f"{tensor.name} of a {self._family.name} model"
        if not by_two:
            whole = "" if tensor.scale else f", by whole copies{self._multiples(tensor)}"
            raise InputError(
                f"{what} would be multiplied by {factor:.6g}, which rounds; {grows} can grow by "
                f"powers of four{whole}, or as asked with {BOUNDED}"
            )
        raise InputError(
            f"{what}, to which its class adds {tensor.offset:g}, would be multiplied by "
            f"{factor:g}, which rounds; {grows} can grow by whole copies, or as asked with "
            f"{BOUNDED}"
        )

    def _copies_read(self, tensor: Described) -> float:
        """How many copies of everything are read, of which some could be read as a whole."""
        read = Pattern.parse(tensor.pattern).axes(Role.READ) & self._expansions.keys()
        return math.prod(int(self._expansions[axis].counts.min()) for axis in read)

    def config(self, source: Config, config: Config) -> Config:
        """The target's config with what its norms add to the means.

        Args:
            source: the source's config.
            config: the target's, in which sizes have been set.

        Raises:
            InputError: there is no such config.
        """
        before = self._family.complete(source)
        shrunk: dict[str, dict[float, str]] = {}
        for norm in self._norms(before):
            mean = self._mean(norm)
            if norm.eps is None and mean != 1:
                raise self._refusal(norm.over, "what their class adds to the mean is fixed")
            if norm.eps is not None:
                shrunk.setdefault(norm.eps, {})[mean] = norm.over
        changed = {key: means for key, means in shrunk.items() if set(means) != {1.0}}
        if not changed:
            return config
        for key, means in changed.items():
            if self._rounding and len(means) == 2:  # where nothing grows, eps is next to nothing
                means.pop(1.0, None)
            if len(means) > 1:
                raise self._refusal(
                    " and ".join(means.values()), f"{key} serves norms over both, that change apart"
                )
            if type(before[key]) not in (int, float):
                raise InputError(
                    f"config.json of a {self._family.name} model has {key} {before[key]!r}; a "
                    "number was expected"
                )
            config = {**config, key: before[key] * next(iter(means))}
        # What the class would derive from that stays what it was.
        after = self._family.complete(config)
        derived = {k: before[k] for k in self._family.defaults if before[k] != after[k]}
        return config | {k: value for k, value in derived.items() if k not in config}

    def _norms(self, complete: Config) -> Iterator[Norm]:
        for tensor in self._family.tensors:
            if tensor.norm and tensor.when(complete):
                yield tensor.norm
        yield from self._family.norms

    def _mean(self, norm: Norm) -> float:
        """The mean square of a space in the target, as a part of that in the source."""
        expansion = self._expansions.get(norm.over)
        if expansion is None or expansion.copies:
            return 1.0
        if expansion.counts.min() != expansion.counts.max():
            raise self._refusal(norm.over, "uneven copies do not keep it")
        if norm.centred:
            raise self._refusal(norm.over, "and take away the mean, which zeros do not keep")
        return float(expansion.counts.sum()) / len(expansion.source)

    def _multiples(self, tensor: Described) -> str:
        """The whole multiples that are nearest to what was asked for, the present size aside."""
        axis = tensor.norm.over if tensor.norm else ""
        old, new = self._old.get(axis, 1), self._new.get(axis, 1)
        least = new // old * old
        near = [str(size) for size in (least, least + old) if size > old]
        return f" (to {' or '.join(near)})" if new > least else ""

    def _grows(self, tensor: Described) -> str:
        grown = sorted(axis for axis in self._expansions if axis in tensor.pattern)
        return " and ".join(grown)

    def _refusal(self, axis: str, why: str) -> InputError:
        return InputError(
            f"{axis} cannot grow like this: norms of a {self._family.name} model take a mean over "
            f"it, {why}; choose whole copies, or leave it as it is"
        )


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
