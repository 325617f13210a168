"""How a tensor of an adapter grows, derived from the transform of the weight that it adapts.

A low-rank update is mapped like its weight: if W' = E · W · L, E maps its left factor and L its
right factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, singledispatch

from growkit.algebra.expansion import IndexMap
from growkit.base.axes import Role
from growkit.extras.adapters.adapter_tensors import Entry
from growkit.extras.composed_transforms import Subtensor
from growkit.planning.transforms import Constant, Kept, Mapped, Rounded, Transform, identity_map


@singledispatch
def attached_to(weight: Transform, entry: Entry, target: str) -> Transform | None:
    """The transform of a tensor of an adapter, so that it fits the target of a weight.

    Args:
        weight: the transform of the weight.
        entry: the tensor.
        target: name of the grown tensor, which seeds random splits.

    Returns:
        None if the transform of the weight does not determine one.
    """
    return None


@attached_to.register
def _(weight: Kept, entry: Entry, target: str) -> Transform | None:
    return replace(weight, source=entry.name, factor=weight.factor if entry.kind.scaled else 1.0)


@attached_to.register
def _(weight: Mapped, entry: Entry, target: str) -> Transform | None:
    if entry.dimensions is None:
        return replace(weight, source=entry.name)  # split alike: norms of rows stay those of DoRA
    return Mapped(
        entry.name,
        partial(_maps, weight.make, entry),
        weight.why,
        target,
        weight.shares,
        weight.factor if entry.kind.scaled else 1.0,
        weight.alike,
        resets=weight.resets,
        diverges=weight.diverges,
    )


@attached_to.register
def _(weight: Rounded, entry: Entry, target: str) -> Transform | None:
    mapped = attached_to.dispatch(Mapped)(weight, entry, target)
    return (
        Rounded(**vars(mapped)) if entry.kind.scaled else mapped
    )  # without the factor, none is rounded


@attached_to.register
def _(weight: Constant, entry: Entry, target: str) -> Transform | None:
    # One factor of an update starts at zero, the other lets it train.
    if entry.kind.scaled:
        value = weight.value if entry.dimensions is None else 0.0
        return Constant(entry.info.dtype, value, weight.why)
    return Kept(entry.name, why=weight.why, new=True)


@attached_to.register
def _(weight: Subtensor, entry: Entry, target: str) -> Transform | None:
    attached = attached_to(weight.whole, entry, entry.name)  # sections share one split
    order = entry.dimensions or range(len(weight.begin))
    begin = tuple(0 if dimension is None else weight.begin[dimension] for dimension in order)
    return None if attached is None else Subtensor(attached, begin, weight.why)


def _maps(make: Callable[[], tuple[IndexMap, ...]], entry: Entry) -> tuple[IndexMap, ...]:
    """Select the maps of a tensor of an adapter from the maps of the weight."""
    assert entry.dimensions is not None
    of_weight, pairs = make(), zip(entry.dimensions, entry.info.shape, strict=True)
    maps = [identity_map(size) if d is None else of_weight[d] for d, size in pairs]
    copied = entry.kind.copied
    return tuple(replace(mapped, role=Role.WRITTEN) if copied else mapped for mapped in maps)
