"""The law of growth: W' = E_out · W · L_in, for any rectangular slice of one tensor.

A space in which every coordinate gets copies has the expansion E that repeats coordinates
(x' = E x) and any left inverse L that spreads a weight over the copies so that the parts sum to it
(L E = I). A tensor's written dimensions are repeated, its read dimensions are split, and the model
computes the same function: HyperCloning, arXiv 2409.12903, section 3, for any tensor whose axes
are named. A slice of the target needs only what it copies of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.axes import Role
from growkit.algebra.expansion import NOTHING, Group, Index, IndexMap
from growkit.algebra.noise import noise
from growkit.algebra.shares import Shares
from growkit.algebra.splits import join, split, split_apart

Rows = Callable[[slice], Tensor]
"""Reads some rows of a tensor."""

FEW = 256
"""Runs of neighbours, at most, that are copied one by one; more are gathered at once."""


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
    rows: Rows, maps: Sequence[IndexMap], name: str, shares: Shares, where: Sequence[slice]
) -> Tensor:
    """A slice of a grown tensor.

    Args:
        rows: reads rows of the source tensor.
        maps: of every dimension, of which at most one that is read grows.
        name: the tensor's name, which seeds its random splits.
        shares: how read weights are split over the copies.
        where: the slice, with begin and end for each dimension of the target.
    """
    slices = [_slice(m, w.start, w.stop) for m, w in zip(maps, where, strict=True)]
    tensor = _read(rows, slices[0].needed)
    for position, each in enumerate(slices):
        if position and not each.whole:
            tensor = tensor.index_select(position, torch.from_numpy(each.needed))
    split_at: int | None = None
    for position, (mapped, each) in enumerate(zip(maps, slices, strict=True)):
        if mapped.role is Role.READ and not mapped.identity:
            assert split_at is None, f"{name} reads two spaces that grow"
            split_at = position
        else:
            tensor = _arranged(tensor, position, each.place)
    if split_at is None:
        return tensor
    return _spread(tensor, split_at, maps, slices, name, shares)


def _read(rows: Rows, needed: Index) -> Tensor:
    """Rows of the source; neighbours are read together."""
    if not len(needed):
        return rows(slice(0, 0))
    runs = np.split(needed, np.flatnonzero(np.diff(needed) != 1) + 1)
    if len(runs) > FEW:  # reading what lies between costs less than so many calls
        begin = int(needed[0])
        return rows(slice(begin, int(needed[-1]) + 1))[torch.from_numpy(needed - begin)]
    found = [rows(slice(int(run[0]), int(run[-1]) + 1)) for run in runs]
    return found[0] if len(found) == 1 else torch.cat(found)


def _arranged(tensor: Tensor, position: int, place: Index) -> Tensor:
    """Coordinates of one dimension at their places; zeros where there is nothing."""
    if len(place) == tensor.shape[position] and bool((place == np.arange(len(place))).all()):
        return tensor
    return _filled([tensor], position, np.zeros_like(place), place)


def _filled(pieces: Sequence[Tensor], position: int, piece: Index, place: Index) -> Tensor:
    """Put a dimension together: of each coordinate's piece the coordinate at its place."""
    shape = list(pieces[0].shape)
    length = shape[position]
    shape[position] = len(place)
    runs = _runs(piece, place)
    if len(runs) > FEW:
        joined = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), position)
        index = torch.from_numpy(np.maximum(piece * length + place, 0))
        found = joined.index_select(position, index)
        empty = torch.from_numpy(place == NOTHING)
        return found.index_fill_(position, empty.nonzero()[:, 0], 0) if empty.any() else found
    found = pieces[0].new_empty(shape)
    for begin, end in runs:
        target = found.narrow(position, begin, end - begin)
        if place[begin] == NOTHING:
            target.zero_()
        else:
            of = pieces[piece[begin]]
            target.copy_(of.narrow(position, int(place[begin]), end - begin))
    return found


def _runs(piece: Index, place: Index) -> list[tuple[int, int]]:
    """Neighbours that lie side by side in one piece, or hold nothing."""
    nothing = place == NOTHING
    together = np.where(nothing[1:], nothing[:-1], (np.diff(place) == 1) & ~nothing[:-1])
    breaks = np.flatnonzero(~(together & (np.diff(piece) == 0))) + 1
    ends = [*breaks.tolist(), len(place)]
    return list(zip([0, *breaks.tolist()], ends, strict=True)) if len(place) else []


def _spread(
    tensor: Tensor,
    position: int,
    maps: Sequence[IndexMap],
    slices: Sequence[Slice],
    name: str,
    shares: Shares,
) -> Tensor:
    """Split a read dimension over its copies (L_in): the parts of a weight sum to it exactly."""
    mapped, part = maps[position], slices[position]
    here = slice(part.begin, part.begin + len(part.place))
    parts, which, share = mapped.parts[here], mapped.part[here], mapped.share[here]
    draws = _Draws(maps, slices, position, name, shares)
    pieces: list[Tensor] = []
    piece, place = np.zeros_like(part.place), part.place.copy()
    for count in np.unique(parts[part.place != NOTHING]).tolist():
        chosen = np.flatnonzero((parts == count) & (part.place != NOTHING))
        columns = np.unique(part.place[chosen])
        weight = tensor
        if len(columns) < tensor.shape[position]:
            weight = tensor.index_select(position, torch.from_numpy(columns))
        if count:
            made = draws.split(weight, count, columns)
            piece[chosen] = len(pieces) + which[chosen]
        else:  # factors that are given
            factors, number = np.unique(share[chosen], return_inverse=True)
            made = [_multiplied(weight, factor) for factor in factors.tolist()]
            piece[chosen] = len(pieces) + number
        place[chosen] = np.searchsorted(columns, part.place[chosen])
        pieces += made
    return _joined(pieces, position, piece, place) if pieces else _arranged(tensor, position, place)


def _joined(pieces: Sequence[Tensor], position: int, piece: Index, place: Index) -> Tensor:
    """As ``_filled``, of pieces that need not be equally long."""
    lengths = {each.shape[position] for each in pieces}
    if len(lengths) == 1:
        return _filled(pieces, position, piece, place)
    offsets = np.cumsum([0, *(each.shape[position] for each in pieces)])
    joined = torch.cat(list(pieces), position)
    moved = np.where(place == NOTHING, NOTHING, offsets[piece] + place)
    return _filled([joined], position, np.zeros_like(piece), moved)


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

    def split(self, weight: Tensor, count: int, columns: Index) -> list[Tensor]:
        """Parts of a weight; ``columns`` are places in what the slice needs of the source."""
        if not self._shares.amplitude:
            return split(weight, count, lambda node: None)
        drawn: dict[str, Tensor] = {}

        def draw(node: int, number: int = 0) -> Tensor:
            key = self._shares.key(self._name, node, number)
            if key not in drawn:
                drawn[key] = self._share(key, columns)
            return drawn.pop(key)

        if len(self._maps) == 1:
            return split_apart(weight, count, draw)
        return split(weight, count, draw)

    def _share(self, key: str, columns: Index) -> Tensor:
        coordinates, lengths = [], []
        for position, (mapped, each) in enumerate(zip(self._maps, self._slices, strict=True)):
            if position == self._position:
                coordinates.append(each.needed[columns])
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
        amplitude = self._shares.amplitude
        numbers = torch.from_numpy(np.ascontiguousarray(field)).float()
        step = amplitude / 2**15
        share = numbers.mul_(step).add_(0.5 + step / 2)
        return share.view([len(each) for each in coordinates])


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
    found: Tensor | None = _read(rows, standing)
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
        return tensor.index_select(position, torch.from_numpy(places))

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
    order = torch.from_numpy(np.argsort(np.concatenate(sources)))
    return backs[0] if len(backs) == 1 else torch.cat(backs, position).index_select(position, order)


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
                    yield [
                        rows[torch.from_numpy(copy)].reshape(len(copy), -1)
                        for copy in group.targets
                    ]


def shape_of(maps: Sequence[IndexMap]) -> tuple[int, ...]:
    """The shape of the target."""
    return tuple(len(each) for each in maps)


def elements(where: Sequence[slice]) -> int:
    """Number of elements of a slice."""
    return prod(each.stop - each.start for each in where)
