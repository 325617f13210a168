"""How a tensor of an adapter grows, derived from the transform of the weight that it adapts.

A low-rank update is mapped like its weight: if W' = E · W · L, E maps its left factor and L its
right factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, singledispatch

from growkit.algebra.expansion import IndexMap
from growkit.base.axes import Role
from growkit.planning.transforms import (
    Constant,
    Kept,
    Mapped,
    Rounded,
    Subtensor,
    Transform,
    identity_map,
)


@dataclass(frozen=True)
class Attached:
    """A tensor of an adapter, which grows with the weight that it adapts.

    Attributes:
        source: name of the tensor.
        target: name of the grown tensor, which seeds random splits.
        shape: shape of the tensor.
        dtype: safetensors name of its dtype.
        dimensions: for each of its dimensions, the dimension of the weight that it follows, or None
            if it does not grow; None as a whole if the tensor replaces the weight.
        scaled: whether the tensor is multiplied by the weight's factor.
        copied: whether the tensor is copied where the weight is split.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[int | None, ...] | None = None
    scaled: bool = True
    copied: bool = False


@singledispatch
def attached_to(weight: Transform, one: Attached) -> Transform | None:
    """The transform of a tensor of an adapter, so that it fits the target of a weight.

    Args:
        weight: the transform of the weight.
        one: the tensor.

    Returns:
        None if the transform of the weight does not determine one.
    """
    return None


@attached_to.register
def _(weight: Kept, one: Attached) -> Transform | None:
    return replace(weight, source=one.source, factor=weight.factor if one.scaled else 1.0)


@attached_to.register
def _(weight: Mapped, one: Attached) -> Transform | None:
    if one.dimensions is None:
        return replace(weight, source=one.source)  # split alike: norms of rows stay those of DoRA
    return Mapped(
        one.source,
        partial(_maps, weight.make, one),
        weight.why,
        one.target,
        weight.shares,
        weight.factor if one.scaled else 1.0,
        weight.alike,
        resets=weight.resets,
        diverges=weight.diverges,
    )


@attached_to.register
def _(weight: Rounded, one: Attached) -> Transform | None:
    mapped = attached_to.dispatch(Mapped)(weight, one)
    return Rounded(**vars(mapped)) if one.scaled else mapped  # without the factor, none is rounded


@attached_to.register
def _(weight: Constant, one: Attached) -> Transform | None:
    # One factor of an update starts at zero, the other lets it train.
    if one.scaled:
        return Constant(one.dtype, weight.value if one.dimensions is None else 0.0, weight.why)
    return Kept(one.source, why=weight.why, new=True)


@attached_to.register
def _(weight: Subtensor, one: Attached) -> Transform | None:
    of_all = replace(one, target=one.source)  # sections share one split
    attached, order = attached_to(weight.whole, of_all), one.dimensions or range(len(weight.begin))
    begin = tuple(0 if dimension is None else weight.begin[dimension] for dimension in order)
    return None if attached is None else Subtensor(attached, begin, weight.why)


def _maps(make: Callable[[], tuple[IndexMap, ...]], one: Attached) -> tuple[IndexMap, ...]:
    """Select the maps of a tensor of an adapter from the maps of the weight."""
    assert one.dimensions is not None
    of_weight, pairs = make(), zip(one.dimensions, one.shape, strict=True)
    maps = [identity_map(size) if d is None else of_weight[d] for d, size in pairs]
    return tuple(replace(mapped, role=Role.WRITTEN) if one.copied else mapped for mapped in maps)
