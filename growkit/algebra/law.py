"""The law of growth: W' = E_out · W · L_in, one tensor at a time.

A space in which every coordinate gets copies has the expansion E that repeats coordinates
(x' = E x) and any left inverse L that spreads a weight over the copies so that the parts sum to it
(L E = I). A tensor's written dimensions are repeated, its read dimensions are split, and the model
computes the same function: HyperCloning, arXiv 2409.12903, section 3, for any tensor whose axes
are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import torch
from torch import Tensor

from growkit.algebra.axes import Dimension, Layout, Role
from growkit.algebra.expansion import NONE, Expansion
from growkit.algebra.shares import Shares
from growkit.algebra.splits import join, split, split_apart

BLOCK_ELEMENTS = 1 << 18
"""Elements of the target made at a time: few enough to stay in a core's
cache, enough for a write to be worth its call."""


def grow_tensor(
    weight: Tensor,
    name: str,
    layout: Layout,
    sizes: Mapping[str, int],
    expansions: Mapping[str, Expansion],
    shares: Shares,
) -> Iterator[Tensor]:
    """Grow one tensor.

    Args:
        weight: the source tensor, of shape ``layout.shape(sizes)``.
        name: the tensor's name, which seeds its random splits.
        layout: which axes the tensor reads and writes.
        sizes: size of every axis in the source.
        expansions: of every grown axis; axes that are left out stay.
        shares: how read weights are split over the copies.

    Yields:
        Consecutive blocks of the target along dimension 0, about ``BLOCK_ELEMENTS`` elements each,
        so that memory stays near one source tensor.
    """
    assert tuple(weight.shape) == layout.shape(sizes), (name, weight.shape, layout)
    grown = {axis: size * expansions.get(axis, NONE).copies for axis, size in sizes.items()}
    generator = torch.Generator().manual_seed(shares.seed_of(name))
    first, *others = layout.dimensions

    if first.role is Role.WRITTEN:
        rows = source_index(first, sizes, expansions)
        row_elements = prod(dimension.size(grown) for dimension in others)
        chunks = rows.split(max(1, BLOCK_ELEMENTS // row_elements))
        blocks = (weight[chunk] for chunk in chunks)
        dimensions = list(enumerate(others, start=1))
    else:
        blocks = (block for block in (weight,))
        dimensions = list(enumerate(layout.dimensions))

    for block in blocks:
        for position, dimension in dimensions:
            if dimension.size(grown) == dimension.size(sizes):
                continue
            if dimension.role is Role.WRITTEN:
                block = block.index_select(position, source_index(dimension, sizes, expansions))
            else:
                block = _spread(block, position, dimension, sizes, expansions, shares, generator)
        yield block


def collapse_tensor(
    grown: Tensor, layout: Layout, sizes: Mapping[str, int], expansions: Mapping[str, Expansion]
) -> Tensor | None:
    """Undo ``grow_tensor``: W = L_out · W' · E_in, where every choice of L must give the same.

    Args:
        grown: the target tensor; or some rows of it, where these do not grow.
        layout: which axes the tensor reads and writes.
        sizes: size of every axis in the source.
        expansions: of every grown axis.

    Returns:
        The source tensor, bit for bit; or None if the copies of some row do not agree.
    """
    growing = [(i, each) for i, each in enumerate(layout.dimensions) if grows(each, expansions)]
    for position, dimension in growing:
        if dimension.role is Role.READ:
            slots = _slots(grown, position, dimension, sizes, expansions)
            shape = list(grown.shape)
            shape[position] = dimension.size(sizes)
            grown = join([slot.reshape(shape) for slot in slots])
    for position, dimension in growing:
        if dimension.role is Role.WRITTEN:
            index = source_index(dimension, sizes, expansions)
            first = torch.empty(dimension.size(sizes), dtype=torch.long)
            first[index.flip(0)] = torch.arange(len(index)).flip(0)
            source = grown.index_select(position, first)
            if not source.index_select(position, index).equal(grown):
                return None
            grown = source
    return grown


def grows(dimension: Dimension, expansions: Mapping[str, Expansion]) -> bool:
    """Whether any axis of a dimension gets copies."""
    return any(expansions.get(axis, NONE).copies > 1 for axis in dimension.axes)


def copies_in(
    grown: Tensor, layout: Layout, sizes: Mapping[str, int], expansions: Mapping[str, Expansion]
) -> Iterator[list[Tensor]]:
    """The copies inside a grown tensor, or inside anything of its shape, such as its gradient.

    Only what is written has copies; what is read has parts.

    Args:
        grown: of the shape of the target.
        layout: which axes the tensor reads and writes.
        sizes: size of every axis in the source.
        expansions: of every grown axis.

    Yields:
        For every product of axes with copies one tensor per copy, all of the same shape:
        [coordinates of the product in the source, everything else].
    """
    for position, dimension in enumerate(layout.dimensions):
        rows, offset = grown.movedim(position, 0), 0
        for axes in dimension.products:
            part = Dimension(dimension.role, (axes,))
            length = part.size(sizes)
            copies = prod(expansions.get(axis, NONE).copies for axis in axes)
            if copies > 1 and length and dimension.role is Role.WRITTEN:
                section = rows[offset : offset + length * copies].reshape(length * copies, -1)
                slots = _slots(section, 0, part, sizes, expansions)
                yield [slot.reshape(length, -1) for slot in slots]
            offset += length * copies


def source_index(
    dimension: Dimension, sizes: Mapping[str, int], expansions: Mapping[str, Expansion]
) -> Tensor:
    """For every coordinate of the grown dimension, the source coordinate that it copies (E)."""
    indices: list[Tensor] = []
    offset = 0
    for factors in dimension.products:
        shape = [sizes[axis] for axis in factors]
        index = torch.arange(offset, offset + prod(shape)).view(shape)
        for position, axis in enumerate(factors):
            expansion = expansions.get(axis, NONE)
            if expansion.side_by_side:
                index = index.repeat_interleave(expansion.copies, position)
            else:
                index = torch.cat([index] * expansion.copies, position)
        indices.append(index.flatten())
        offset += prod(shape)
    return torch.cat(indices)


def _spread(
    block: Tensor,
    position: int,
    dimension: Dimension,
    sizes: Mapping[str, int],
    expansions: Mapping[str, Expansion],
    shares: Shares,
    generator: torch.Generator,
) -> Tensor:
    """Split a read dimension over its copies (L_in): the parts of a weight sum to it exactly."""
    (axes,) = dimension.products
    factor = prod(expansions.get(axis, NONE).copies for axis in axes)
    shape = list(block.shape)
    shape[position] *= factor
    grown = block.new_empty(shape)
    slots = _slots(grown, position, dimension, sizes, expansions)
    take_apart = split_apart if block.dim() == 1 else split
    parts = take_apart(block, factor, shares.amplitude, generator)
    for part, slot in zip(parts, slots, strict=True):
        slot.copy_(part.view(slot.shape))
    return grown


def _slots(
    grown: Tensor,
    position: int,
    dimension: Dimension,
    sizes: Mapping[str, int],
    expansions: Mapping[str, Expansion],
) -> list[Tensor]:
    """One view of a grown tensor for each copy of a read dimension.

    Returns:
        Views of shape [before, axis 0, axis 1, …, after].
    """
    (axes,) = dimension.products
    shape: list[int] = []
    places: list[int] = []
    for axis in axes:
        expansion = expansions.get(axis, NONE)
        places.append(position + len(shape) + expansion.side_by_side)
        pair = (sizes[axis], expansion.copies)
        shape.extend(pair if expansion.side_by_side else reversed(pair))
    view = grown.view(*grown.shape[:position], *shape, *grown.shape[position + 1 :])
    view = view.movedim(places, list(range(len(axes))))
    copies = (range(expansions.get(axis, NONE).copies) for axis in axes)
    return [view[copy] for copy in product(*copies)]
