"""The copies in a tensor, and what copies nothing, whose gradients may differ."""

from collections.abc import Iterator, Sequence

from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.growth_law import take
from growkit.base.axes import Role
from growkit.base.lazy import Tensor, np


def copies_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[list[Tensor]]:
    """Yield the copies in a tensor of the target's shape, such as a weight or its gradient.

    Only written dimensions have copies; read dimensions have parts.

    Args:
        tensor: a tensor of the target's shape.
        maps: the index map of every dimension.

    Yields:
        For every number of copies, one tensor per copy, all of shape [source coordinates with that
        number of copies, product of the other dimensions].
    """
    for position, mapped in enumerate(maps):
        if mapped.role is Role.WRITTEN:
            rows = tensor.movedim(position, 0)
            for group in mapped.groups:
                if len(group.targets) > 1:
                    yield [take(rows, 0, copy).reshape(len(copy), -1) for copy in group.targets]


def zeros_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[tuple[IndexMap, Tensor]]:
    """Yield the values at written coordinates that copy nothing and therefore start as zeros.

    Zeros in read dimensions are left out, since their inputs are always zero.

    Args:
        tensor: see ``copies_in``.
        maps: the index map of every dimension.

    Yields:
        The map of every dimension with such coordinates, and the values as [coordinates, product
        of the other dimensions].
    """
    for position, mapped in enumerate(maps):
        places = np.flatnonzero(mapped.source == NOTHING)
        if mapped.role is Role.WRITTEN and len(places):
            yield mapped, take(tensor.movedim(position, 0), 0, places).reshape(len(places), -1)
