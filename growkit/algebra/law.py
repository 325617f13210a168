"""The law of growth: W' = E_out · W · L_in, for any rectangular slice of one tensor.

A space in which every coordinate gets copies has the expansion E that repeats coordinates
(x' = E x) and any left inverse L that spreads a weight over the copies so that the parts sum to it
(L E = I). A tensor's written dimensions are repeated, its read dimensions are split, and the model
computes the same function: HyperCloning, arXiv 2409.12903, section 3, for any tensor whose axes
are named. A slice of the target needs only what it copies of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.axes import Role
from growkit.algebra.expansion import NOTHING, Group, Index, IndexMap
from growkit.algebra.shares import Shares, uneven_first
from growkit.algebra.splits import join, noise, split, split_apart

FEW = 256
"""Runs of neighbours, at most, that are copied one by one; more are gathered at once."""


@dataclass(frozen=True)
class Arrangement:
    """How a dimension is put together from pieces.

    Attributes:
        piece: for each coordinate the piece that it comes from.
        place: its place there, or ``NOTHING``.
        runs: begin and end of neighbours that lie side by side in one piece, or hold nothing.
    """

    piece: Index
    place: Index
    runs: list[tuple[int, int]]

    @classmethod
    def of(cls, piece: Index, place: Index) -> Arrangement:
        """Find the runs."""
        nothing = place == NOTHING
        beside = np.where(nothing[1:], nothing[:-1], (np.diff(place) == 1) & ~nothing[:-1])
        breaks = (np.flatnonzero(~beside | (np.diff(piece) != 0)) + 1).tolist()
        runs = list(zip([0, *breaks], [*breaks, len(place)], strict=True)) if len(place) else []
        return cls(piece, place, runs)

    def places(self, found: Tensor, position: int, length: int, pieces: range) -> list[Tensor]:
        """Where pieces stand in what is put together, if each stands there whole and once."""
        if len(self.runs) > FEW:
            return []
        at = {self.piece[begin]: (begin, end) for begin, end in self.runs if end - begin == length}
        whole = [at[piece] for piece in pieces if piece in at]
        if len(whole) < len(pieces):
            return []
        return [found.narrow(position, begin, end - begin) for begin, end in whole]

    def __call__(
        self, pieces: Sequence[Tensor], position: int, found: Tensor | None = None
    ) -> Tensor:
        """Put a dimension of tensors together; in ``found`` some may have their place already."""
        if self.runs == [(0, pieces[0].shape[position])] and self.place[0] == self.piece[0] == 0:
            return pieces[0]
        if len(self.runs) > FEW:
            return self._gathered(pieces, position)
        if found is None:
            found = self.room(pieces[0], position)
        for begin, end in self.runs:
            target, place = found.narrow(position, begin, end - begin), int(self.place[begin])
            if place == NOTHING:
                target.zero_()
            else:
                piece = pieces[self.piece[begin]].narrow(position, place, end - begin)
                if piece.data_ptr() != target.data_ptr():
                    target.copy_(piece)
        return found

    def room(self, piece: Tensor, position: int) -> Tensor:
        """Room for what is put together of pieces like this one."""
        shape = list(piece.shape)
        shape[position] = len(self.place)
        return piece.new_empty(shape)

    def _gathered(self, pieces: Sequence[Tensor], position: int) -> Tensor:
        begins = np.cumsum([0, *(piece.shape[position] for piece in pieces)])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), position)
        index = np.maximum(begins[self.piece] + self.place, 0)
        found = joined.index_select(position, torch.from_numpy(index))
        nothing = np.flatnonzero(self.place == NOTHING)
        return found.index_fill_(position, torch.from_numpy(nothing), 0) if len(nothing) else found


Rows = Callable[[slice], Tensor]
"""Reads some rows of a tensor."""


class Read(Protocol):
    """Reads some rows of a tensor, and of these all columns or some."""

    def __call__(self, rows: slice, columns: slice | None = None) -> Tensor:
        """The part of the tensor; columns are those of the second dimension."""
        ...


@dataclass(frozen=True)
class Slice:
    """Some neighbouring coordinates of a grown dimension, and what they need of the source.

    Attributes:
        begin: first coordinate of the target.
        needed: coordinates of the source, in ascending order.
        place: for each coordinate of the slice the place in ``needed``, or ``NOTHING``.
        whole: whether all coordinates of the source are needed.
    """

    begin: int
    needed: Index
    place: Index
    whole: bool


@lru_cache(maxsize=256)  # of all blocks of a tensor, the columns are the same
def _slice(mapped: IndexMap, begin: int, end: int) -> Slice:
    source = mapped.source[begin:end]
    needed = np.unique(source[source != NOTHING])
    place = np.where(source == NOTHING, NOTHING, np.searchsorted(needed, source))
    return Slice(begin, needed, place, len(needed) == mapped.size)


def grow(
    read: Read, maps: Sequence[IndexMap], name: str, shares: Shares, where: Sequence[slice]
) -> Tensor:
    """A slice of a grown tensor.

    Args:
        read: reads the source tensor, of which it asks for what is copied and nothing else.
        maps: of every dimension, of which at most one that is read grows.
        name: the tensor's name, which seeds its random splits.
        shares: how read weights are split over the copies.
        where: the slice, with begin and end for each dimension of the target.
    """
    slices = [_slice(m, w.start, w.stop) for m, w in zip(maps, where, strict=True)]
    narrow = len(slices) > 1 and not slices[1].whole
    rows = partial(_columns, read, slices[1].needed) if narrow else read
    tensor = _joined(rows, slices[0].needed, 0)
    for position, each in enumerate(slices):
        if position > 1 and not each.whole:
            tensor = tensor.index_select(position, torch.from_numpy(each.needed))
    split_at: int | None = None
    for position, (mapped, each) in enumerate(zip(maps, slices, strict=True)):
        if mapped.role is Role.READ and not mapped.identity:
            assert split_at is None, f"{name} reads two spaces that grow"
            split_at = position
        else:
            end = each.begin + len(each.place)
            tensor = _arrangement(mapped, each.begin, end)([tensor], position)
    if split_at is None:
        return tensor
    return _spread(tensor, split_at, maps, slices, name, shares)


def _columns(read: Read, needed: Index, rows: slice) -> Tensor:
    """Some columns of rows of the source."""
    return _joined(partial(read, rows), needed, 1)


def _joined(read: Rows, needed: Index, position: int) -> Tensor:
    """Some coordinates of one dimension of the source; neighbours are read together."""
    if not len(needed):
        return read(slice(0, 0))
    breaks = [0, *(np.flatnonzero(np.diff(needed) != 1) + 1).tolist(), len(needed)]
    runs = ((int(needed[begin]), end - begin) for begin, end in pairwise(breaks))
    found = [read(slice(begin, begin + count)) for begin, count in runs]
    return found[0] if len(found) == 1 else torch.cat(found, position)


@lru_cache(maxsize=256)
def _arrangement(mapped: IndexMap, begin: int, end: int) -> Arrangement:
    place = _slice(mapped, begin, end).place
    return Arrangement.of(np.zeros_like(place), place)


@dataclass(frozen=True)
class Reading:
    """What a slice of a read dimension is made of.

    Attributes:
        columns: for each kind of reading the places, in what is needed of the source, that it is
            for; None for all of them.
        parts: for each kind, into how many parts the weight is split; 0 for given factors.
        factors: for each kind, the factors that are given.
        arrangement: of all parts and products, in order.
    """

    columns: list[Index | None]
    parts: list[int]
    factors: list[list[float]]
    arrangement: Arrangement


@lru_cache(maxsize=256)
def _reading(mapped: IndexMap, begin: int, end: int) -> Reading:
    sliced, here = _slice(mapped, begin, end), slice(begin, end)
    parts, which, share = mapped.parts[here], mapped.part[here], mapped.share[here]
    some = sliced.place != NOTHING
    found = Reading([], [], [], Arrangement.of(sliced.place, sliced.place))
    piece, place, pieces = np.zeros_like(sliced.place), sliced.place.copy(), 0
    for count in np.unique(parts[some]).tolist():
        chosen = np.flatnonzero((parts == count) & some)
        columns = np.unique(sliced.place[chosen])
        factors, number = np.unique(share[chosen], return_inverse=True)
        piece[chosen] = pieces + (which[chosen] if count else number)
        pieces += count or len(factors)
        place[chosen] = np.searchsorted(columns, sliced.place[chosen])
        found.columns.append(None if len(columns) == len(sliced.needed) else columns)
        found.parts.append(count)
        found.factors.append([] if count else factors.tolist())
    return replace(found, arrangement=Arrangement.of(piece, place))


def _spread(
    tensor: Tensor,
    position: int,
    maps: Sequence[IndexMap],
    slices: Sequence[Slice],
    name: str,
    shares: Shares,
) -> Tensor:
    """Split a read dimension over its copies (L_in): the parts of a weight sum to it exactly."""
    begin = slices[position].begin
    reading = _reading(maps[position], begin, begin + len(slices[position].place))
    draws = _Draws(maps, slices, position, name, shares)
    found = reading.arrangement.room(tensor, position)
    pieces: list[Tensor] = []
    for columns, count, factors in zip(
        reading.columns, reading.parts, reading.factors, strict=True
    ):
        weight = tensor
        if columns is not None:
            weight = tensor.index_select(position, torch.from_numpy(columns))
        if count:
            numbers = range(len(pieces), len(pieces) + count)
            length = weight.shape[position]
            places = reading.arrangement.places(found, position, length, numbers)
            pieces += draws.split(weight, count, columns, places)
        else:
            pieces += [_multiplied(weight, factor) for factor in factors]
    return reading.arrangement(pieces or [tensor], position, found)


class _Draws:
    """The random shares of a slice: a field of noise for every node of the tree of splits.

    A field has a number for each coordinate of the target, but of the split dimension for each
    coordinate of the source.
    """

    def __init__(
        self,
        maps: Sequence[IndexMap],
        slices: Sequence[Slice],
        position: int,
        name: str,
        shares: Shares,
    ) -> None:
        self._maps, self._slices, self._position = maps, slices, position
        self._name, self._shares = name, shares

    def split(
        self, weight: Tensor, count: int, columns: Index | None, places: Sequence[Tensor]
    ) -> list[Tensor]:
        """Parts of a weight.

        Args:
            weight: what is split.
            count: number of parts.
            columns: places in what the slice needs of the source; None for all of it.
            places: where the parts may be put.
        """
        if self._maps[self._position].uneven:
            return split(
                weight,
                count,
                lambda node: torch.full(weight.shape, uneven_first(count, node)),
                places=places if len(self._maps) > 1 else (),
            )
        if not self._shares.amplitude:
            return split(weight, count, lambda node: None)

        def draw(node: int, number: int = 0) -> Tensor:
            return self._share(self._shares.key(self._name, node, number), columns)

        if len(self._maps) == 1:
            return split_apart(weight, count, draw)
        return split(weight, count, draw, places=places)

    def _share(self, key: str, columns: Index | None) -> Tensor:
        coordinates, lengths = [], []
        for position, (mapped, each) in enumerate(zip(self._maps, self._slices, strict=True)):
            if position == self._position:
                coordinates.append(each.needed if columns is None else each.needed[columns])
                lengths.append(mapped.size)
            else:
                coordinates.append(np.arange(each.begin, each.begin + len(each.place)))
                lengths.append(len(mapped))
        *leading, last = coordinates
        rows = np.zeros(1, np.int64)
        for coordinate, length in zip(leading, lengths, strict=False):
            rows = (rows[:, None] * length + coordinate).ravel()
        field = noise(key, rows, lengths[-1])
        if len(last) < lengths[-1]:
            field = field[:, last]
        numbers, step = torch.from_numpy(np.ascontiguousarray(field)), self._shares.step
        share = torch.add(torch.tensor(0.5 + step / 2), numbers, alpha=step)
        return share.view([len(each) for each in coordinates])


def grow_moments(
    read: Read,
    maps: Sequence[IndexMap],
    order: int,
    where: Sequence[slice],
    *,
    resets: bool = False,
) -> Tensor:
    """A slice of an optimizer's moments, for a tensor that ``grow`` grows: G' = L_outᵀ · G · E_inᵀ.

    A weight that reads a copy has the gradient of the weight that was read; one that writes a copy
    has of its gradient the share with which that copy is read.

    Args:
        read: reads the moments of the source's tensor.
        maps: of every dimension of the tensor.
        order: the power in which gradients stand in the moments.
        where: see ``grow``.
        resets: whether copies begin with none, and only the first of each has its source's.
    """
    copied = [replace(each, role=Role.WRITTEN, source=_gathering(each)) for each in maps]
    grown = grow(read, copied, "", Shares(None), where)
    for position, (mapped, each) in enumerate(zip(maps, where, strict=True)):
        if mapped.role is Role.WRITTEN:
            shape = [-1 if dimension == position else 1 for dimension in range(grown.dim())]
            shares = torch.from_numpy(mapped.shares[each] ** order).view(shape)
            grown = grown * shares.to(grown.dtype)
        if resets:
            later = np.flatnonzero(mapped.later[each])
            grown = grown.index_fill(position, torch.from_numpy(later), 0)
    return grown


def _gathering(mapped: IndexMap) -> Index:
    """Whose gradients each coordinate would have gathered: none, where nothing stood so far."""
    fresh = mapped.fresh
    return mapped.source if fresh is None else np.where(fresh, NOTHING, mapped.source)


def undo(rows: Rows, maps: Sequence[IndexMap], of: slice) -> Tensor | None:
    """Undo ``grow``: W = L_out · W' · E_in, where every choice of L must give the same.

    Args:
        rows: reads rows of the grown tensor.
        maps: of every dimension.
        of: the rows of the source that are wanted, with begin and end.

    Returns:
        These rows, bit for bit; or None if the copies of something do not agree, if parts do not
        sum to a number of the dtype, or if there is something where there should be nothing.
    """
    groups = [_between(group, of) for group in maps[0].groups]
    standing = np.concatenate([group.targets.ravel() for group in groups])
    if of.start == 0:
        standing = np.concatenate([standing, np.flatnonzero(maps[0].source == NOTHING)])
    standing.sort()
    found: Tensor | None = _joined(rows, standing, 0)
    # Parts first: copies of a row are the same only when their parts are added up.
    for role in (Role.READ, Role.WRITTEN):
        for position, mapped in enumerate(maps):
            if found is None or mapped.role is not role:
                continue
            if position == 0:
                found = _undone(found, position, mapped, of, standing)
            elif not mapped.identity:
                every = slice(0, mapped.size)
                found = _undone(found, position, mapped, every, np.arange(len(mapped)))
    return found


def _undone(
    tensor: Tensor, position: int, mapped: IndexMap, of: slice, standing: Index
) -> Tensor | None:
    """One dimension as the source has it; see ``undo``.

    Args:
        tensor: what is grown in this dimension.
        position: of the dimension.
        mapped: of the dimension.
        of: the coordinates of the source that are wanted.
        standing: the target's coordinates that ``tensor`` holds, in order.
    """

    def at(targets: Index) -> Tensor:
        places = np.searchsorted(standing, targets)
        if len(places) == tensor.shape[position] and bool((np.diff(places) > 0).all()):
            return tensor
        return _taken(tensor, position, places)

    nothing = standing[mapped.source[standing] == NOTHING]
    if len(nothing) and bool(at(nothing).any()):
        return None
    backs, sources = [], []
    for group in (_between(each, of) for each in mapped.groups):
        back = _original([at(copy) for copy in group.targets], group.shares)
        if back is None:
            return None
        backs.append(back)
        sources.append(group.sources)
    order = torch.from_numpy(np.argsort(np.concatenate(sources))).to(backs[0].device)
    return backs[0] if len(backs) == 1 else torch.cat(backs, position).index_select(position, order)


def _taken(tensor: Tensor, position: int, places: Index) -> Tensor:
    """Some coordinates of a dimension; a view, if they follow each other."""
    if len(places) and bool((np.diff(places) == 1).all()):
        return tensor.narrow(position, int(places[0]), len(places))
    return tensor.index_select(position, torch.from_numpy(places).to(tensor.device))


def _original(copies: Sequence[Tensor], shares: Sequence[float | None]) -> Tensor | None:
    """What all of these were made from; None if they were not made from one tensor."""
    parts = [copy for copy, share in zip(copies, shares, strict=True) if share is None]
    given = [(c, share) for c, share in zip(copies, shares, strict=True) if share is not None]
    if parts:
        found = join(parts)
    else:
        told, share = next((copy, share) for copy, share in given if share)
        found = _multiplied(told, 1 / share)
    agree = all(_same(_multiplied(found, share), copy) for copy, share in given)
    return found if agree else None


def _multiplied(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else (tensor.double() * factor).to(tensor.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.element_size() == 1:  # torch does not compare float8
        one, other = one.float(), other.float()
    return one.equal(other)


def _between(group: Group, of: slice) -> Group:
    begin, end = np.searchsorted(group.sources, [of.start, of.stop])
    return Group(group.sources[begin:end], group.targets[:, begin:end], group.shares)


def copies_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[list[Tensor]]:
    """The copies inside a grown tensor, or inside anything of its shape, such as its gradient.

    Only what is written has copies; what is read has parts.

    Args:
        tensor: of the shape of the target.
        maps: of every dimension.

    Yields:
        For every number of copies one tensor per copy, all of the same shape: [coordinates of the
        source that have as many, everything else].
    """
    for position, mapped in enumerate(maps):
        if mapped.role is Role.WRITTEN:
            rows = tensor.movedim(position, 0)
            for group in mapped.groups:
                if len(group.targets) > 1:
                    yield [_taken(rows, 0, copy).reshape(len(copy), -1) for copy in group.targets]


def zeros_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[tuple[IndexMap, Tensor]]:
    """What stands where a grown tensor has zeros because nothing is copied there.

    Only what is written has such zeros; those that are read stand for what is never there.

    Args:
        tensor: see ``copies_in``.
        maps: of every dimension.

    Yields:
        The map of every dimension with such coordinates, and [coordinates, everything else].
    """
    for position, mapped in enumerate(maps):
        places = np.flatnonzero(mapped.source == NOTHING)
        if mapped.role is Role.WRITTEN and len(places):
            zeros = _taken(tensor.movedim(position, 0), 0, places)
            yield mapped, zeros.reshape(len(places), -1)


def shape_of(maps: Sequence[IndexMap]) -> tuple[int, ...]:
    """The shape of the target."""
    return tuple(len(each) for each in maps)


def elements(where: Sequence[slice]) -> int:
    """Number of elements of a slice."""
    return prod(each.stop - each.start for each in where)
