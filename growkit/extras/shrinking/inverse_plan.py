"""Undoing a plan: its source, from what the plan made of it, as the inverse of ``Planned``.

If nothing has changed the target since, the source is recovered bit for bit. Where training has
changed copies, least squares decide: the source is their mean, and the sum of parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import ANYWHERE, TensorInfo, Weights, cut, full, same_numbers
from growkit.extras.composed_transforms import Stacked, Subtensor
from growkit.planning.plan import Lineage, Plan, Rule
from growkit.planning.transforms import Transform


@dataclass(frozen=True)
class CopiedPiece:
    """A part of a target that one transform makes.

    Attributes:
        target: name of the target.
        transform: the transform, which may make more than this piece.
        shape: shape of the piece.
        begin: first index of the piece in what the transform makes; empty if it is all of it.
        row: first row of the piece in the target, or in one of its matrices.
        matrix: index of that matrix; None if the target is not a stack.
    """

    target: str
    transform: Transform
    shape: tuple[int, ...]
    begin: tuple[int, ...] = ()
    row: int = 0
    matrix: int | None = None

    def read(self, weights: Weights, of: slice) -> Tensor:
        """Read some rows of the piece."""
        rows = slice(self.row + of.start, self.row + of.stop)
        if self.matrix is None:
            return weights.read(self.target, rows)
        return weights.read(self.target, slice(self.matrix, self.matrix + 1), rows)[0]


def _pieces(rule: Rule) -> Iterator[CopiedPiece]:
    """The pieces of a target."""
    for piece in _of_matrices(rule):
        if isinstance(piece.transform, Subtensor):
            yield replace(piece, transform=piece.transform.whole, begin=piece.transform.begin)
        else:
            yield piece


def _of_matrices(rule: Rule) -> Iterator[CopiedPiece]:
    if not isinstance(rule.transform, Stacked):
        yield CopiedPiece(rule.target, rule.transform, rule.info.shape)
        return
    for matrix, parts in enumerate(rule.transform.matrices):
        row = 0
        for transform, count in parts:
            shape = (count, *rule.info.shape[2:])
            yield CopiedPiece(rule.target, transform, shape, row=row, matrix=matrix)
            row += count


def _joined(weights: Weights, pieces: Sequence[CopiedPiece], of: slice) -> Tensor:
    """Rows of what a transform makes, from pieces of it."""
    bands: dict[int, list[CopiedPiece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        bands.setdefault(piece.begin[0] if piece.begin else 0, []).append(piece)
    rows = []
    for begin, band in bands.items():
        start, stop = max(of.start, begin), min(of.stop, begin + band[0].shape[0])
        if start < stop:
            inside = slice(start - begin, stop - begin)
            blocks = [piece.read(weights, inside) for piece in band]
            rows.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True)
class Inverse:
    """The way back from the targets of a plan to its sources.

    Attributes:
        plan: the plan.
        known: the targets that can be read.
    """

    plan: Plan
    known: Collection[str]

    @cached_property
    def copies(self) -> Mapping[str, Sequence[Mapping[tuple[int, ...], CopiedPiece]]]:
        """For every source that can be recovered, its copies, as pieces by where they begin."""
        copies: dict[str, list[dict[tuple[int, ...], CopiedPiece]]] = {}
        for rule in self.plan.rules:
            for piece in _pieces(rule) if rule.target in self.known else ():
                if piece.transform.reversible:
                    (source,) = piece.transform.sources
                    of_source = copies.setdefault(source, [])
                    # Pieces that begin alike belong to different copies.
                    for pieces in of_source if piece.begin else ():
                        if () not in pieces and piece.begin not in pieces:
                            pieces[piece.begin] = piece
                            break
                    else:
                        of_source.append({piece.begin: piece})
        return copies


def inverses(lineage: Lineage) -> list[Inverse]:
    """The way back from a target, the last step first."""
    steps: list[Inverse] = []
    known: Collection[str] = lineage.target.tensors
    for plan in reversed(lineage.plans):
        steps.append(Inverse(plan, known))
        known = steps[-1].copies.keys()
    return steps


class Undone(Weights):
    """The source of a plan, computed from its targets when it is read.

    Args:
        target: the targets.
        inverse: the way back.
        tensors: headers of the source.
    """

    def __init__(
        self, target: Weights, inverse: Inverse, tensors: Mapping[str, TensorInfo]
    ) -> None:
        self.tensors = tensors
        self._target, self._copies = target, inverse.copies

    def where(self, name: str | None = None) -> str:
        """The file of the first piece of a tensor."""
        pieces = self._copies[name][0] if name else {}
        return self._target.where(next((piece.target for piece in pieces.values()), None))

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Recover a part of a tensor: the mean of its copies, if they differ."""
        rows, *others = full(self.tensors[name].shape, where) or [slice(0, 1)]
        copies = []
        for pieces in self._copies[name]:
            joined = partial(_joined, self._target, [*pieces.values()])
            copy = next(iter(pieces.values())).transform.undo(joined, rows, nearest=True)
            assert copy is not None
            copies.append(copy)
        tensor = copies[0]
        if not all(same_numbers(tensor, copy) for copy in copies[1:]):
            tensor = torch.stack([copy.double() for copy in copies]).mean(0).to(tensor.dtype)
        return cut(tensor, (None, *others))

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return ANYWHERE


def sources_of(steps: Sequence[Inverse], name: str) -> list[str]:
    """The targets of the last step from which a source of the first is recovered."""
    names = {name: None}
    for step in reversed(steps):
        copies = [pieces for of in names for pieces in step.copies[of]]
        names = {piece.target: None for pieces in copies for piece in pieces.values()}
    return [*names]
