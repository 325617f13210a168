"""A dimension that is put together from pieces, run by run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING, Index

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
