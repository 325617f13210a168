"""How an optimizer's moments grow, derived from the transforms of the weights.

The moments are those that the target would have gathered itself if the gradients of copies are
equal: with equal shares, and equally many copies of everything. Otherwise a norm mixes the
gradients of copies, and the moments are an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.growth_law import Read, grow_slice
from growkit.algebra.splits import Shares
from growkit.algebra.update_law import Update
from growkit.base.axes import Role
from growkit.base.tensors import Weights
from growkit.extras.composed_transforms import Stacked, Subtensor
from growkit.planning.transforms import Constant, Kept, Mapped, Slices, Transform


@singledispatch
def moments_of(transform: Transform, order: int) -> Transform | None:
    """The transform that grows moments with the weights of a transform.

    Args:
        transform: the transform of the weights.
        order: 1 for means of gradients, 2 for means of their squares.

    Returns:
        A transform that reads moments in place of weights; None if there is none.
    """
    return None


@moments_of.register
def _(transform: Kept, order: int) -> Transform | None:
    # A weight twice as large has gradients half as large.
    factor = (transform.factor * transform.siblings) ** -order
    return None if transform.new else Kept(transform.source, factor)


@moments_of.register
def _(transform: Mapped, order: int) -> Transform | None:
    return MappedMoments(transform, order) if transform.alike else None


@moments_of.register
def _(transform: Constant, order: int) -> Transform | None:
    return Constant(transform.dtype, 0.0, transform.why)  # a new tensor has no moments yet


@moments_of.register
def _(transform: Subtensor, order: int) -> Transform | None:
    moments = moments_of(transform.whole, order)
    return None if moments is None else replace(transform, whole=moments)


@moments_of.register
def _(transform: Stacked, order: int) -> Transform | None:
    matrices = [
        [(moments, rows) for part, rows in parts if (moments := moments_of(part, order))]
        for parts in transform.matrices
    ]
    complete = [*map(len, matrices)] == [*map(len, transform.matrices)]
    return replace(transform, matrices=matrices) if complete else None


@dataclass(frozen=True, eq=False)
class MappedMoments(Transform):
    """Moments of weights that are copied and split: the dual of ``Mapped``.

    Each copy has the part of the gradient with which it is read.

    Attributes:
        weight: the transform of the weights.
        order: see ``moments_of``.
    """

    weight: Mapped
    order: int
    why: str = "moments of copies"

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return self.weight.sources

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        weight, read = self.weight, partial(source.read, self.weight.source)
        grown = grow_moments(read, weight.maps, self.order, where, resets=weight.resets)
        return grown if weight.factor == 1 else grown * weight.factor**-self.order

    def update(self, before: Sequence[Update]) -> Update:
        """Moments are not trained."""
        return before[0]


def grow_moments(
    read: Read,
    maps: Sequence[IndexMap],
    order: int,
    where: Sequence[slice],
    *,
    resets: bool = False,
) -> Tensor:
    """Compute a slice of an optimizer's moments for ``grow_slice``: G' = L_outᵀ · G · E_inᵀ.

    A weight that reads a copy gets the gradient of the source weight. A weight that writes a copy
    gets the share of that gradient with which the copy is read.

    Args:
        read: reads the moments of the source tensor.
        maps: the index map of every dimension of the tensor.
        order: the power of gradients in the moments.
        where: see ``grow_slice``.
        resets: whether only the first copy gets the source's moments, and later copies get zeros.
    """
    copied = [replace(mapped, role=Role.WRITTEN) for mapped in maps]
    for number, mapped in enumerate(maps):
        if mapped.fresh is not None:  # a new coordinate has no moments yet
            source = np.where(mapped.fresh, NOTHING, mapped.source)
            copied[number] = replace(copied[number], source=source)
    grown = grow_slice(read, copied, "", Shares(None), where)
    for position, (mapped, part) in enumerate(zip(maps, where, strict=True)):
        if mapped.role is Role.WRITTEN:
            shape = [-1 if dimension == position else 1 for dimension in range(grown.dim())]
            shares = torch.from_numpy(mapped.shares[part] ** order).view(shape)
            grown = grown * shares.to(grown.dtype)
        if resets:
            later = np.flatnonzero(mapped.later[part])
            grown = grown.index_fill(position, torch.from_numpy(later), 0)
    return grown
