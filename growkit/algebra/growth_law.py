"""The law of growth: W' = E_out · W · L_in, for any rectangular slice of one tensor.

The expansion E of a space repeats its coordinates (x' = E x). A left inverse L spreads a weight
over the copies, so that its parts sum to it (L E = I). A tensor's written dimensions are repeated
and its read dimensions are split; the model then computes the same function (HyperCloning, arXiv
2409.12903, section 3, for any tensor with named axes). A slice of the target needs only the source
coordinates that it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from growkit.algebra.expansion import NOTHING, Group, Index, IndexMap
from growkit.algebra.splits import Shares, join, noise, split, split_apart
from growkit.base.axes import Role
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import same_numbers, widened

Rows = Callable[[slice], Tensor]
"""Reads some rows of a tensor."""

Read = Callable[..., Tensor]
"""Reads some rows of a tensor, with all columns or some, each given as a slice."""

FEW = 256
"""Largest number of contiguous runs that are copied one by one; more are gathered at once."""


class Arrangement:
    """Assembles a dimension from pieces.

    Attributes:
        piece: index of each coordinate's piece.
        place: index of each coordinate within its piece, or ``NOTHING``.
        runs: begin and end of runs that are contiguous in one piece, or hold nothing.
    """

    def __init__(self, piece: Index, place: Index) -> None:
        self.piece, self.place = piece, place
        nothing = place == NOTHING
        adjacent = np.where(nothing[1:], nothing[:-1], (np.diff(place) == 1) & ~nothing[:-1])
        breaks = (np.flatnonzero(~adjacent | (np.diff(piece) != 0)) + 1).tolist()
        self.runs = list(pairwise([0, *breaks, len(place)])) if len(place) else []

    def __call__(self, pieces: Sequence[Tensor], position: int) -> Tensor:
        """Assemble a dimension of tensors."""
        if self.runs == [(0, pieces[0].shape[position])] and self.place[0] == self.piece[0] == 0:
            return pieces[0]
        if len(self.runs) > FEW:
            begins = np.cumsum([0, *(piece.shape[position] for piece in pieces)])
            joined = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), position)
            index = np.maximum(begins[self.piece] + self.place, 0)
            gathered = joined.index_select(position, torch.from_numpy(index))
            nothing = torch.from_numpy(np.flatnonzero(self.place == NOTHING))
            return gathered.index_fill_(position, nothing, 0) if len(nothing) else gathered
        shape = list(pieces[0].shape)
        shape[position] = len(self.place)
        assembled = pieces[0].new_empty(shape)
        for start, end in self.runs:
            target, place = assembled.narrow(position, start, end - start), int(self.place[start])
            if place == NOTHING:
                target.zero_()
            else:
                target.copy_(pieces[self.piece[start]].narrow(position, place, end - start))
        return assembled


Pieces = tuple["Index | None", int, list[float]]
"""Weights with the same kind of split: their indices among the needed coordinates (None for all),
the number of parts of each weight (0 for explicit factors), and the explicit factors."""


@dataclass(frozen=True)
class Slice:
    """A contiguous range of a grown dimension, with its construction from the source.

    Attributes:
        targets: canonical coordinates of the target.
        needed: coordinates of the source, in ascending order.
        whole: whether all coordinates of the source are needed.
        kinds: groups of weights with the same kind of split; empty for a written dimension.
        arrangement: puts the copies, or the parts and products, in their places.
    """

    targets: Index
    needed: Index
    whole: bool
    kinds: list[Pieces]
    arrangement: Arrangement


@lru_cache(maxsize=256)  # all blocks of a tensor have the same columns
def _slice(mapped: IndexMap, start: int, end: int) -> Slice:
    here = slice(start, end)
    source = mapped.source[here]
    copied = source != NOTHING
    needed = np.unique(source[copied])
    within = np.where(copied, np.searchsorted(needed, source), NOTHING)
    piece, place, pieces = np.zeros_like(within), within.copy(), 0
    kinds: list[Pieces] = []
    if mapped.role is Role.READ and not mapped.identity:
        parts, which, share = mapped.parts[here], mapped.part[here], mapped.share[here]
        for count in np.unique(parts[copied]).tolist():
            chosen = np.flatnonzero((parts == count) & copied)
            columns = np.unique(within[chosen])
            factors, number = np.unique(share[chosen], return_inverse=True)
            piece[chosen] = pieces + (which[chosen] if count else number)
            pieces += count or len(factors)
            place[chosen] = np.searchsorted(columns, within[chosen])
            every = len(columns) == len(needed)
            kinds.append((None if every else columns, count, [] if count else factors.tolist()))
    complete = len(needed) == mapped.size
    targets = np.arange(start, end) if mapped.canonical is None else mapped.canonical[here]
    return Slice(targets, needed, complete, kinds, Arrangement(piece, place))


def grow_slice(
    read: Read, maps: Sequence[IndexMap], name: str, shares: Shares, where: Sequence[slice]
) -> Tensor:
    """Compute a slice of a grown tensor.

    Args:
        read: reads the source tensor; called for copied coordinates only.
        maps: the index map of every dimension; at most one read dimension grows.
        name: the tensor's canonical name, which seeds its random splits.
        shares: shares by which read weights are split over the copies.
        where: the slice, with begin and end for each dimension of the target.
    """
    slices = [_slice(m, w.start, w.stop) for m, w in zip(maps, where, strict=True)]
    narrow = len(slices) > 1 and not slices[1].whole

    def rows(rows_read: slice) -> Tensor:
        return (
            _read_runs(partial(read, rows_read), slices[1].needed, 1) if narrow else read(rows_read)
        )

    tensor = _read_runs(rows, slices[0].needed, 0)
    for position, part in enumerate(slices):
        if position > 1 and not part.whole:
            tensor = tensor.index_select(position, torch.from_numpy(part.needed))
    split_at: int | None = None
    for position, (mapped, part) in enumerate(zip(maps, slices, strict=True)):
        if mapped.role is Role.READ and not mapped.identity:
            assert split_at is None, f"{name} reads two spaces that grow"
            split_at = position
        else:
            tensor = part.arrangement([tensor], position)
    return tensor if split_at is None else _spread(tensor, split_at, maps, slices, name, shares)


def _read_runs(read: Rows, needed: Index, position: int) -> Tensor:
    """Read some coordinates of one source dimension; contiguous ones are read together."""
    if not len(needed):
        return read(slice(0, 0))
    breaks = [0, *(np.flatnonzero(np.diff(needed) != 1) + 1).tolist(), len(needed)]
    runs = ((int(needed[start]), end - start) for start, end in pairwise(breaks))
    blocks = [read(slice(start, start + count)) for start, count in runs]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, position)


def _spread(
    tensor: Tensor,
    position: int,
    maps: Sequence[IndexMap],
    slices: Sequence[Slice],
    name: str,
    shares: Shares,
) -> Tensor:
    """Split a read dimension over its copies (L_in): the parts of a weight sum to it exactly."""
    here = slices[position]
    places = [part.targets for part in slices]
    # Noise has one number per target coordinate; in the split dimension, per source coordinate.
    lengths = [len(mapped) for mapped in maps]
    lengths[position] = maps[position].size
    split_weight = split_apart if len(maps) == 1 and shares.amplitude else split
    pieces: list[Tensor] = []
    for columns, count, factors in here.kinds:
        weight, places[position] = tensor, here.needed
        if columns is not None:
            weight = tensor.index_select(position, torch.from_numpy(columns))
            places[position] = here.needed[columns]
        if not count:
            pieces += [_multiply(weight, factor) for factor in factors]
            continue

        def draw(node: int, number: int = 0, count: int = count) -> Tensor | None:
            shape = [len(place) for place in places]
            if not shares.amplitude:
                return None
            return _noisy_shares(places, lengths, shares, shares.key(name, node, number)).view(
                shape
            )

        pieces += split_weight(weight, count, draw)
    return here.arrangement(pieces or [tensor], position)


def _noisy_shares(
    places: Sequence[Index], lengths: Sequence[int], shares: Shares, key: str
) -> Tensor:
    """Draw random shares of first parts for some places of a tensor with these lengths."""
    *leading, last = places
    rows = np.zeros(1, np.int64)
    for place, length in zip(leading, lengths, strict=False):
        rows = (rows[:, None] * length + place).ravel()
    field = noise(key, rows, lengths[-1])
    if len(last) < lengths[-1] or (np.diff(last) != 1).any():
        field = field[:, last]
    numbers, step = torch.from_numpy(np.ascontiguousarray(field)), shares.step
    return torch.add(torch.tensor(0.5 + step / 2), numbers, alpha=step)


def undo(
    rows: Rows, maps: Sequence[IndexMap], of: slice, *, nearest: bool = False
) -> Tensor | None:
    """Undo ``grow_slice``: W = L_out · W' · E_in, with the same result for every choice of L.

    Args:
        rows: reads rows of the grown tensor.
        maps: the index map of every dimension.
        of: the requested rows of the source, with begin and end.
        nearest: whether to take the pseudo-inverses of even splits where training has changed
            copies: their mean, and the sum of parts, each rounded once.

    Returns:
        These rows, bit for bit; None if copies disagree, if parts do not sum to a number of the
        dtype, or if a coordinate that copies nothing is not zero, unless ``nearest``.
    """
    groups = [_between(group, of) for group in maps[0].groups]
    needed = np.concatenate([group.targets.ravel() for group in groups])
    if of.start == 0:
        needed = np.concatenate([needed, np.flatnonzero(maps[0].source == NOTHING)])
    needed.sort()
    tensor: Tensor | None = _read_runs(rows, needed, 0)
    # Parts first: copies of a row are equal only after their parts are summed.
    for role in (Role.READ, Role.WRITTEN):
        for position, mapped in enumerate(maps):
            if tensor is None or mapped.role is not role or (position and mapped.identity):
                continue
            wanted, held = of, needed
            if position:
                wanted, held = slice(0, mapped.size), np.arange(len(mapped))
            tensor = _undo_dimension(tensor, position, mapped, wanted, held, nearest)
    return tensor


def _undo_dimension(
    tensor: Tensor, position: int, mapped: IndexMap, of: slice, held: Index, nearest: bool
) -> Tensor | None:
    """Undo the growth of one dimension; see ``undo``.

    Args:
        tensor: the tensor, grown in this dimension.
        position: index of the dimension.
        mapped: index map of the dimension.
        of: the requested coordinates of the source.
        held: the target coordinates in ``tensor``, in order.
        nearest: see ``undo``.
    """

    def at(targets: Index) -> Tensor:
        places = np.searchsorted(held, targets)
        if len(places) == tensor.shape[position] and bool((np.diff(places) > 0).all()):
            return tensor
        return take(tensor, position, places)

    nothing = held[mapped.source[held] == NOTHING]
    if len(nothing) and not nearest and bool(at(nothing).any()):
        return None
    backs, sources = [], []
    for group in (_between(group, of) for group in mapped.groups):
        copies = [at(copy) for copy in group.targets]
        back = _recover(copies, group.shares)
        if nearest and (back is None or bool(widened(back).isnan().any())):
            back = _nearest(copies, group.shares)
        if back is None:
            return None
        backs.append(back)
        sources.append(group.sources)
    order = torch.from_numpy(np.argsort(np.concatenate(sources))).to(backs[0].device)
    return backs[0] if len(backs) == 1 else torch.cat(backs, position).index_select(position, order)


def take(tensor: Tensor, position: int, places: Index) -> Tensor:
    """Select some coordinates of a dimension; a view if they are contiguous."""
    if len(places) and bool((np.diff(places) == 1).all()):
        return tensor.narrow(position, int(places[0]), len(places))
    return tensor.index_select(position, torch.from_numpy(places).to(tensor.device))


def _recover(copies: Sequence[Tensor], shares: Sequence[float | None]) -> Tensor | None:
    """Recover the original of some copies; None if they have no common original."""
    parts = [copy for copy, share in zip(copies, shares, strict=True) if share is None]
    weighted = [(c, share) for c, share in zip(copies, shares, strict=True) if share is not None]
    if parts:
        original = join(parts)
    else:
        copy, share = next((copy, share) for copy, share in weighted if share)
        original = _multiply(copy, 1 / share)
    same = (same_numbers(_multiply(original, share), copy) for copy, share in weighted)
    return original if all(same) else None


def _nearest(copies: Sequence[Tensor], shares: Sequence[float | None]) -> Tensor:
    """The sum of parts, or else the number whose shares are nearest to the copies."""
    pairs = [*zip(copies, shares, strict=True)]
    weights = [(copy, 1.0) for copy, share in pairs if share is None]
    if not weights:
        squares = sum(share**2 for share in shares if share)
        weights = [(copy, share / squares) for copy, share in pairs if share]
    total = torch.stack([copy.double() * weight for copy, weight in weights]).sum(0)
    return total.to(copies[0].dtype)


def _multiply(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else (tensor.double() * factor).to(tensor.dtype)


def _between(group: Group, of: slice) -> Group:
    start, end = np.searchsorted(group.sources, [of.start, of.stop])
    return Group(group.sources[start:end], group.targets[:, start:end], group.shares)
