"""Expansions: for each coordinate of a grown space, its source coordinate and its share.

An expansion is an index map with shares. It represents copies in blocks or side by side, uneven
copies, padding and placement by hand. Growth, its inverse and the comparison of copies all use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import TypeAlias

from growkit.algebra.splits import even_shares
from growkit.base.axes import Axis, Dimension, Form, Role
from growkit.base.lazy import NDArray, np

Index: TypeAlias = "NDArray[np.int64]"
Factors: TypeAlias = "NDArray[np.float64]"
Mask: TypeAlias = "NDArray[np.bool_]"

NOTHING = -1
"""Source coordinate of a target coordinate that copies nothing and holds zero."""

SPLIT = math.nan
"""Share of a copy that reads one part of an exact split; all parts sum to the weight."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """The expansion of one space.

    Attributes:
        size: number of coordinates in the source.
        source: for each target coordinate, the source coordinate that it copies, or ``NOTHING``.
        share: for each target coordinate, the share of its readers' weight: ``SPLIT``, or a factor
            (1 for all of it, 0 for none).
        like: for each target coordinate that copies nothing, the source coordinate whose readers
            are copied so that it can learn; ``NOTHING`` for no reader. None if there is no such
            coordinate.
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
        """The common number of copies; None if numbers differ, or a coordinate copies nothing."""
        even = self.size and bool((self.counts == self.counts[0]).all())
        return int(self.counts[0]) if even and len(self.source) == self.counts.sum() else None


def placed(
    size: int, source: Sequence[int] | Index, share: Sequence[float] | None = None
) -> Expansion:
    """Make an expansion from explicit source coordinates; shares are ``SPLIT`` by default."""
    shares = np.full(len(source), SPLIT) if share is None else np.asarray(share, np.float64)
    return Expansion(size, np.asarray(source, np.int64), shares)


def uneven(size: int, target: int, *, groups: bool) -> Expansion:
    """Copy the space as often as it fits, and the first coordinates once more.

    Args:
        size: number of coordinates in the source.
        target: number of coordinates in the target, at least ``size``.
        groups: whether copies are side by side.
    """
    source = np.arange(target) % size
    return placed(size, np.sort(source) if groups else source)


def in_blocks(size: int, copies: int) -> Expansion:
    """Repeat the whole space: copy c of coordinate i is at size · c + i."""
    return uneven(size, size * copies, groups=False)


def filled_up(size: int, target: int) -> Expansion:
    """Repeat the whole space as often as it fits, then add zeros with the first readers."""
    place = np.arange(target)
    copied = place < target // size * size
    expansion = placed(size, np.where(copied, place % size, NOTHING))
    return replace(expansion, like=np.where(copied, NOTHING, place % size))


def following(groups: Expansion, size: int, target: int) -> Expansion:
    """Expand the members of groups with their groups: query heads with their key-value head.

    Every copy of a group gets copies of the group's own members, in turn.

    Args:
        groups: the expansion of the groups.
        size: number of members in the source; groups are contiguous and of equal size.
        target: number of members in the target.
    """
    per_group, wanted = size // groups.size, target // len(groups.source)
    assert per_group * groups.size == size
    assert wanted * len(groups.source) == target
    copy = _occurrences(groups.source, groups.source != NOTHING)
    member = (copy[:, None] * wanted + np.arange(wanted)) % per_group
    source = np.where(
        groups.source[:, None] == NOTHING, NOTHING, groups.source[:, None] * per_group + member
    )
    return placed(size, source.ravel())


def in_places(size: int, wanted: Sequence[int | None]) -> Expansion:
    """Place every coordinate once where given; fill gaps with copies that nothing reads."""
    spare = cycle(range(size))
    source = [next(spare) if coordinate is None else coordinate for coordinate in wanted]
    return placed(size, source, [float(coordinate is not None) for coordinate in wanted])


@dataclass(frozen=True, eq=False)
class IndexMap:
    """The expansion of one dimension of a tensor, composed from the expansions of its axes.

    Attributes:
        role: whether the tensor writes the dimension (shares are then unused) or reads it.
        size: length of the dimension in the source.
        source: as in ``Expansion``; for a reader, ``like`` replaces ``NOTHING``.
        share: as in ``Expansion``.
        fresh: mask of coordinates whose weights are copies of readers (``like``), though the
            coordinate itself is zero; None if there are none.
        canonical: the canonical coordinate of each stored one, which numbers its random shares, so
            that they do not depend on the storage order; None if the orders are the same.
    """

    role: Role
    size: int
    source: Index
    share: Factors
    fresh: Mask | None = None
    canonical: Index | None = None

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def identity(self) -> bool:
        """Whether the dimension is unchanged."""
        same = len(self) == self.size and bool((self.source == np.arange(self.size)).all())
        plain = self.role is Role.WRITTEN or bool((np.isnan(self.share) | (self.share == 1)).all())
        return same and plain

    @cached_property
    def parts(self) -> Index:
        """The number of parts of each coordinate's split; 0 for no split."""
        split = self._is_split
        return np.where(split, np.bincount(self.source[split], minlength=self.size)[self.source], 0)

    @cached_property
    def part(self) -> Index:
        """The index of each coordinate's part, in the order of the target coordinates."""
        return _occurrences(self.source, self._is_split)

    @cached_property
    def shares(self) -> Factors:
        """The share of every coordinate for splits without noise; 0 if it copies nothing."""
        plain = [even_shares(max(count, 1)) for count in range(int(self.parts.max(initial=0)) + 1)]
        split = [plain[parts][part] for parts, part in zip(self.parts, self.part, strict=True)]
        shares = np.where(self._is_split, np.asarray(split, np.float64), self.share)
        return np.where(self.source == NOTHING, 0.0, shares)

    @cached_property
    def later(self) -> Mask:
        """Mask of copies after the first one of their source coordinate."""
        return np.asarray(_occurrences(self.source, self.source != NOTHING) > 0)

    @property
    def nothing(self) -> Mask:
        """Mask of coordinates that hold nothing of the source."""
        return np.asarray((self.source == NOTHING) | (self.role is Role.READ) & (self.share == 0))

    def in_wholes(self, count: int) -> IndexMap:
        """Give the first copies the whole weight, and the remaining copies none.

        Args:
            count: number of copies with the whole weight.
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
        """The source coordinates, grouped by number of copies and by their shares."""
        chosen = self.source != NOTHING
        counts = np.bincount(self.source[chosen], minlength=self.size)
        targets = np.argsort(self.source, kind="stable")[len(self) - int(chosen.sum()) :]
        begins = np.concatenate([[0], np.cumsum(counts)])
        groups = []
        for count in np.unique(counts).tolist():
            sources = np.flatnonzero(counts == count)
            copies = targets[begins[sources] + np.arange(count)[:, None]]
            shares = np.nan_to_num(self.share[copies], nan=np.inf)  # NaN differs from itself
            if self.role is Role.WRITTEN:
                shares[:] = 1
            patterns, number = np.unique(shares, axis=1, return_inverse=True)
            for index, pattern in enumerate(patterns.T):
                alike = number == index
                read = tuple(None if np.isinf(share) else float(share) for share in pattern)
                groups.append(Group(sources[alike], copies[:, alike], read))
        return groups


@dataclass(frozen=True, eq=False)
class Group:
    """Source coordinates with the same number of copies and the same shares.

    Attributes:
        sources: source coordinates, in ascending order.
        targets: their copies, [copies, sources], in ascending order for each source.
        shares: the share of each copy; None for a part of an exact split.
    """

    sources: Index
    targets: Index
    shares: tuple[float | None, ...]


def _occurrences(source: Index, chosen: Mask) -> Index:
    """Count, for each chosen coordinate, earlier ones with the same source; 0 elsewhere."""
    earlier = np.zeros(len(source), np.int64)
    places = np.flatnonzero(chosen)
    order = places[np.argsort(source[places], kind="stable")]
    in_order = source[order]
    earlier[order] = np.arange(len(order)) - np.searchsorted(in_order, in_order, side="left")
    return earlier


def index_map(
    dimension: Dimension,
    sizes: Mapping[str, int],
    expansions: Mapping[str, Expansion],
    order: tuple[Sequence[int], Sequence[int]] | None = None,
    *,
    weighs: bool = False,
) -> IndexMap:
    """Compose the map of a dimension from those of its axes.

    Args:
        dimension: the dimension and its axes.
        sizes: size of every axis in the source.
        expansions: the expansion of every grown axis; axes without one are unchanged.
        order: canonical coordinates of the stored ones, in the source and in the target; None if
            coordinates are stored in canonical order.
        weighs: whether the written elements are weights of their coordinates, as in a norm; they
            are then copied for zero coordinates too, as in readers.
    """
    reads = weighs or dimension.role is Role.READ
    source, share = _compose(dimension.form, sizes, expansions, reads=reads)
    fresh, canonical = None, None
    if any(expansion.like is not None for expansion in expansions.values()):
        fresh = source != _compose(dimension.form, sizes, expansions, reads=False)[0]
    if order is not None:
        before, canonical = (np.asarray(indices, np.int64) for indices in order)
        stored = np.empty(len(before) + 1, np.int64)
        stored[before] = np.arange(len(before))
        stored[-1] = NOTHING  # NOTHING is -1 and indexes this element
        source, share = stored[source[canonical]], share[canonical]
        fresh = None if fresh is None else fresh[canonical]
    return IndexMap(dimension.role, dimension.size(sizes), source, share, fresh, canonical)


def _compose(
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
            source, share = _compose(term, sizes, expansions, reads=reads)
            sources.append(np.where(source == NOTHING, NOTHING, source + offset))
            shares.append(share)
            offset += term.size(sizes)
        return np.concatenate(sources), np.concatenate(shares)
    source, share = np.zeros(1, np.int64), np.ones(1)
    for factor in form.parts:
        inner, inner_share = _compose(factor, sizes, expansions, reads=reads)
        nothing = (source == NOTHING)[:, None] | (inner == NOTHING)
        source = np.where(nothing, NOTHING, source[:, None] * factor.size(sizes) + inner).ravel()
        share = _multiply_shares(share[:, None], inner_share).ravel()
    return source, share


def _multiply_shares(share: Factors, other: Factors) -> Factors:
    """Multiply two shares; 0 of a split part (NaN) is 0, and 1 of it is the part."""
    return np.where((share == 0) | (other == 0), 0.0, share * other)
