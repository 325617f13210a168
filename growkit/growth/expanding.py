"""From expansions, one for each space that grows, to the rules of a plan.

Whatever a method wants of a space (whole copies, uneven ones, zeros, places chosen by hand) is an
expansion, and from there on one law. What a model class makes of positions and of means is held
against the expansions first: heads must find the copies of what serves them in their group, and a
norm must find a mean that it can be told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from growkit.algebra.axes import Dimension, Pattern, Role
from growkit.algebra.orders import Order
from growkit.algebra.shares import Shares
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import TORCH_NAMES, Config, TensorInfo, Weights
from growkit.families.description import Tensor as Described
from growkit.families.family import Family
from growkit.growth.factors import Factors
from growkit.planning.plan import Plan, Rule, unused_tensors
from growkit.planning.transform import Slices
from growkit.planning.transforms import Kept, Mapped

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import Expansion, IndexMap
    from growkit.algebra.law import Rows
    from growkit.planning.update import Update


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
        recomputed_sources={r.target: r.why for r in rules if isinstance(r.transform, Rounded)},
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
