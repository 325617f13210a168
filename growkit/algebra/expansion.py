"""Expansions: for each coordinate of a grown space, what it copies, and how it is read.

An expansion is an index map with shares. Copies in blocks or side by side, uneven copies, padding
and placement by hand are all this one thing; growing, undoing, and comparing copies follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import TypeAlias

from growkit.algebra.axes import Axis, Dimension, Form, Role
from growkit.algebra.splits import even_shares, uneven_shares
from growkit.base.lazy import NDArray, np

Index: TypeAlias = "NDArray[np.int64]"
Factors: TypeAlias = "NDArray[np.float64]"
Mask: TypeAlias = "NDArray[np.bool_]"

NOTHING = -1
"""The source coordinate of what copies none: zero."""

SPLIT = math.nan
"""The share of a copy that reads a part of the weight: the parts of all such copies sum to it."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """How one space grows.

    Attributes:
        size: number of coordinates in the source.
        source: for each target coordinate the source coordinate that it copies, or ``NOTHING``.
        share: for each target coordinate how it is read: ``SPLIT``, or a factor of the weight (1
            for all of it, 0 for none).
        like: for each target coordinate that copies nothing, the source coordinate whose readers
            are copied for it, so that it can learn; ``NOTHING`` for no reader. None where nothing
            is read like that.
    """

    size: int
    source: Index
    share: Factors
    like: Index | None = None

    def __post_init__(self) -> None:
        assert self.source.shape == self.share.shape
        assert self.like is None or (self.source == NOTHING)[self.like != NOTHING].all()
        assert self.source.max(initial=-1) < self.size
        assert self.source.min(initial=0) >= NOTHING
        assert self.counts.all(), "a coordinate is lost"

    @cached_property
    def counts(self) -> Index:
        """The number of copies of every coordinate."""
        return np.bincount(self.source[self.source != NOTHING], minlength=self.size)

    @property
    def copies(self) -> int | None:
        """The number of copies of every coordinate; None if they differ, or something is zero."""
        even = self.size and bool((self.counts == self.counts[0]).all())
        return int(self.counts[0]) if even and len(self.source) == self.counts.sum() else None


def placed(
    size: int, source: Sequence[int] | Index, share: Sequence[float] | None = None
) -> Expansion:
    """Every coordinate in its given place."""
    shares = np.full(len(source), SPLIT) if share is None else np.asarray(share, np.float64)
    return Expansion(size, np.asarray(source, np.int64), shares)


def uneven(size: int, target: int, *, groups: bool) -> Expansion:
    """As many copies of each coordinate as fit, and one more of the first ones.

    Args:
        size: number of coordinates in the source.
        target: number of coordinates that there are to be, at least as many.
        groups: whether copies are side by side.
    """
    source = np.arange(target) % size
    return placed(size, np.sort(source) if groups else source)


def in_blocks(size: int, copies: int) -> Expansion:
    """The whole space again and again: copy c of coordinate i is at size · c + i."""
    return uneven(size, size * copies, groups=False)


def filled_up(size: int, target: int) -> Expansion:
    """As many whole copies as fit, followed by zeros that are read like the first coordinates."""
    place = np.arange(target)
    copied = place < target // size * size
    expansion = placed(size, np.where(copied, place % size, NOTHING))
    return replace(expansion, like=np.where(copied, NOTHING, place % size))


def following(groups: Expansion, size: int, target: int) -> Expansion:
    """Members of groups, copied next to their group: query heads with their key-value head.

    Every copy of a group is served by copies of the group's own members, taken in turn.

    Args:
        groups: of what serves them.
        size: number of members in the source; groups are neighbours, all of one size.
        target: number of members that there are to be.
    """
    each, wanted = size // groups.size, target // len(groups.source)
    assert each * groups.size == size
    assert wanted * len(groups.source) == target
    copy = _running(groups.source, groups.source != NOTHING)
    member = (copy[:, None] * wanted + np.arange(wanted)) % each
    source = np.where(
        groups.source[:, None] == NOTHING, NOTHING, groups.source[:, None] * each + member
    )
    return placed(size, source.ravel())


def in_places(size: int, wanted: Sequence[int | None]) -> Expansion:
    """Every coordinate once where it is wanted, and copies that nothing reads everywhere else."""
    spare = cycle(range(size))
    source = [next(spare) if each is None else each for each in wanted]
    return placed(size, source, [float(each is not None) for each in wanted])


@dataclass(frozen=True, eq=False)
class IndexMap:
    """The expansion of one dimension of a tensor, however it is composed of spaces.

    Attributes:
        role: whether the tensor writes the dimension (then shares mean nothing) or reads it.
        size: its length in the source.
        source: as in ``Expansion``; or, of what reads it, that of ``like``.
        share: as in ``Expansion``.
        fresh: where weights are copied for what is still zero; None for nowhere.
        uneven: whether the parts of a weight are unequal on purpose, all alike
            (``growkit.algebra.splits.uneven_shares``).
    """

    role: Role
    size: int
    source: Index
    share: Factors
    fresh: Mask | None = None
    uneven: bool = False

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def identity(self) -> bool:
        """Whether the dimension stays as it is."""
        same = len(self) == self.size and bool((self.source == np.arange(self.size)).all())
        plain = self.role is Role.WRITTEN or bool((np.isnan(self.share) | (self.share == 1)).all())
        return same and plain

    @cached_property
    def period(self) -> int | None:
        """The number of coordinates after which the same ones are copied again; None if none is."""
        again = np.flatnonzero(self.source == self.source[0])[1:2]
        periodic = len(again) and bool((self.source[again[0] :] == self.source[: -again[0]]).all())
        return int(again[0]) if periodic else None

    @cached_property
    def parts(self) -> Index:
        """Into how many parts the weight of the source coordinate is split; 0 for no split."""
        split = self._is_split
        return np.where(split, np.bincount(self.source[split], minlength=self.size)[self.source], 0)

    @cached_property
    def part(self) -> Index:
        """Which of the parts is read, in the order of the target coordinates."""
        return _running(self.source, self._is_split)

    @cached_property
    def shares(self) -> Factors:
        """With what share every coordinate is read, if splits have no noise; 0 for nothing."""
        of = uneven_shares if self.uneven else even_shares
        plain = [of(max(count, 1)) for count in range(int(self.parts.max(initial=0)) + 1)]
        split = [plain[parts][part] for parts, part in zip(self.parts, self.part, strict=True)]
        given = np.where(self._is_split, np.asarray(split, np.float64), self.share)
        return np.where(self.source == NOTHING, 0.0, given)

    @cached_property
    def later(self) -> Mask:
        """Whether a coordinate is a copy, and not the first one of its source coordinate."""
        return np.asarray(_running(self.source, self.source != NOTHING) > 0)

    @property
    def nothing(self) -> Mask:
        """Whether a coordinate holds nothing of the source."""
        unread = (self.role is Role.READ) & (self.share == 0)
        return np.asarray(unread | (self.source == NOTHING))

    def in_wholes(self, count: int) -> IndexMap:
        """The same copies, with the first ones read as a whole, and the rest not at all.

        Args:
            count: of copies that are read.
        """
        if self.role is Role.WRITTEN:
            return self
        share = np.where(self._is_split, (self.part < count).astype(np.float64), self.share)
        return replace(self, share=share)

    @property
    def _is_split(self) -> Mask:
        return np.asarray(np.isnan(self.share) & (self.source != NOTHING))

    @cached_property
    def groups(self) -> list[Group]:
        """The source coordinates that have as many copies, which are read alike."""
        chosen = self.source != NOTHING
        counts = np.bincount(self.source[chosen], minlength=self.size)
        targets = np.argsort(self.source, kind="stable")[len(self) - int(chosen.sum()) :]
        begins = np.concatenate([[0], np.cumsum(counts)])
        found = []
        for count in np.unique(counts).tolist():
            sources = np.flatnonzero(counts == count)
            copies = targets[begins[sources] + np.arange(count)[:, None]]
            shares = np.nan_to_num(self.share[copies], nan=np.inf)  # NaN differs from itself
            if self.role is Role.WRITTEN:
                shares[:] = 1
            patterns, number = np.unique(shares, axis=1, return_inverse=True)
            for index, pattern in enumerate(patterns.T):
                alike = number == index
                read = tuple(None if np.isinf(each) else float(each) for each in pattern)
                found.append(Group(sources[alike], copies[:, alike], read))
        return found


@dataclass(frozen=True, eq=False)
class Group:
    """Source coordinates whose copies are as many, and read alike.

    Attributes:
        sources: in ascending order.
        targets: of each its copies, [copies, sources], those of one source in ascending order.
        shares: of each copy, None for a part of an exact split.
    """

    sources: Index
    targets: Index
    shares: tuple[float | None, ...]


def _running(source: Index, chosen: Mask) -> Index:
    """For each chosen coordinate, how many before it have the same source; 0 elsewhere."""
    found = np.zeros(len(source), np.int64)
    places = np.flatnonzero(chosen)
    order = places[np.argsort(source[places], kind="stable")]
    in_order = source[order]
    found[order] = np.arange(len(order)) - np.searchsorted(in_order, in_order, side="left")
    return found


def index_map(
    dimension: Dimension,
    sizes: Mapping[str, int],
    expansions: Mapping[str, Expansion],
    order: tuple[Sequence[int], Sequence[int]] | None = None,
    *,
    weighs: bool = False,
    uneven: bool = False,
) -> IndexMap:
    """Compose the map of a dimension from those of its axes.

    Args:
        dimension: which axes it has.
        sizes: size of every axis in the source.
        expansions: of every grown axis; axes that are left out stay.
        order: where source and target store the coordinates in another order than that of the
            dimension: for each stored coordinate the one that it would be.
        weighs: whether what is written are weights of its coordinates, as those of a norm are,
            so that they too are copied for what is still zero.
        uneven: see ``IndexMap``.
    """
    reads = weighs or dimension.role is Role.READ
    source, share = _composed(dimension.form, sizes, expansions, reads=reads)
    fresh = None
    if any(each.like is not None for each in expansions.values()):
        fresh = source != _composed(dimension.form, sizes, expansions, reads=False)[0]
    if order is not None:
        before, after = (np.asarray(each, np.int64) for each in order)
        stored = np.empty(len(before) + 1, np.int64)
        stored[before] = np.arange(len(before))
        stored[-1] = NOTHING  # where NOTHING points to
        source, share = stored[source[after]], share[after]
        fresh = None if fresh is None else fresh[after]
    return IndexMap(dimension.role, dimension.size(sizes), source, share, fresh, uneven)


def _composed(
    form: Form, sizes: Mapping[str, int], expansions: Mapping[str, Expansion], *, reads: bool
) -> tuple[Index, Factors]:
    if isinstance(form, Axis):
        grown = expansions.get(form.name)
        if grown is None:
            size = sizes[form.name]
            return np.arange(size), np.full(size, SPLIT)
        assert grown.size == sizes[form.name], form.name
        if grown.like is None or not reads:
            return grown.source, grown.share
        like = grown.like != NOTHING
        return np.where(like, grown.like, grown.source), np.where(like, 1.0, grown.share)
    if not form.product:
        sources, shares, offset = [], [], 0
        for term in form.parts:
            source, share = _composed(term, sizes, expansions, reads=reads)
            sources.append(np.where(source == NOTHING, NOTHING, source + offset))
            shares.append(share)
            offset += term.size(sizes)
        return np.concatenate(sources), np.concatenate(shares)
    source, share = np.zeros(1, np.int64), np.ones(1)
    for factor in form.parts:
        inner, inner_share = _composed(factor, sizes, expansions, reads=reads)
        nothing = (source == NOTHING)[:, None] | (inner == NOTHING)
        source = np.where(nothing, NOTHING, source[:, None] * factor.size(sizes) + inner).ravel()
        share = _both(share[:, None], inner_share).ravel()
    return source, share


def _both(share: Factors, other: Factors) -> Factors:
    """The share of what is read by both; nothing of a part is nothing, all of it is the part."""
    return np.where((share == 0) | (other == 0), 0.0, share * other)
