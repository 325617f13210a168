"""The part of a tensor that is left in a smaller model."""

from collections.abc import Sequence
from dataclasses import dataclass

from growkit.algebra.update_law import Update
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Weights
from growkit.planning.transforms import Slices, Transform


@dataclass(frozen=True, eq=False)
class Selected(Transform):
    """A tensor of which some rows or columns are left.

    Attributes:
        source: its name.
        kept: the indices of these rows or columns, in ascending order.
        why: see ``Transform``.
        at: the dimension, 0 for rows.
    """

    source: str
    kept: Sequence[int]
    why: str
    at: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return (self.source,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        if self.at == 0:
            return read_rows(source, self.source, self.kept[where[0]], where[1:])
        return source.read(self.source, where[0])[:, self.kept[where[1]]]

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return before[0].whole()


def read_rows(
    weights: Weights, name: str, rows: Sequence[int], others: Sequence[slice] = ()
) -> Tensor:
    """Read some rows of a tensor, in ascending order."""
    if not rows:
        return weights.read(name, slice(0, 0), *others)
    places = torch.tensor(rows) - rows[0]
    return weights.read(name, slice(rows[0], rows[-1] + 1), *others)[places]
