"""The contract of a transform, an object that says how one tensor is made from others.

It computes any slice of its target, undoes what it did, and says what its copies are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from growkit.checkpoint.tensors import Weights

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.law import Rows
    from growkit.planning.update import Update

Slices = Sequence[slice]
"""Begin and end in every dimension of a tensor."""


class Transform(Protocol):
    """How a tensor is made."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it is made from."""
        ...

    @property
    def why(self) -> str:
        """One phrase for people."""
        ...

    @property
    def local(self) -> bool:
        """Whether a slice needs only the rows of the source that it copies, not all of it."""
        ...

    @property
    def holds(self) -> bool:
        """Whether it gives its source back, bit for bit."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether computing it again gives the same bits on every machine.

        If not, a check must say what holds of it.
        """
        ...

    @property
    def period(self) -> int | None:
        """The number of rows after which the same bits come again; None where they do not."""
        ...

    def part(self, source: Weights, where: Slices) -> Tensor:
        """A part of the target.

        Args:
            source: has the tensors that it is made from.
            where: begin and end in every dimension.
        """
        ...

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Rows of the source, bit for bit; None if they are lost.

        Args:
            rows: reads rows of the target.
            of: the rows that are wanted, with begin and end.
        """
        ...

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """The copies in anything of the target's shape; see ``growkit.algebra.law.copies_in``."""
        ...

    @property
    def among(self) -> int:
        """Number of tensors that copy this source, each with an equal part of its gradient."""
        ...

    def update(self, before: Sequence[Update]) -> Update:
        """How its updates follow from those of its sources.

        Args:
            before: how each of its sources is updated, beside what the first step was given.
        """
        ...

    def moments(self, order: int) -> Transform | None:
        """How an optimizer's moments of the source become those of the target.

        What is made has the moments that the target would have gathered itself, as far as the
        gradients of copies are equal: for equal shares of as many copies of everything. For others,
        and with noise, a norm mixes the gradients of copies, and it is an approximation.

        Args:
            order: 1 for means of gradients, 2 for means of their squares.

        Returns:
            A transform of the moments in the place of tensors; None if there is none.
        """
        ...
