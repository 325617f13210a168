"""The law of growth: W' = E_out · W · L_in, one tensor at a time.

A space in which every coordinate gets ``n`` copies has the expansion E that repeats coordinates
(x' = E x; copy c of coordinate i stands at n·i + c) and any left inverse L that spreads a weight
over the copies so that the parts sum to it (L E = I). A tensor's written dimensions are repeated,
its read dimensions are split, and the model computes the same function: HyperCloning,
arXiv 2409.12903, section 3, for any tensor whose axes are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

import torch
from torch import Tensor

from growkit.algebra.axes import Dimension, Layout, Role
from growkit.algebra.shares import Shares
from growkit.algebra.splits import split

BLOCK_ELEMENTS = 1 << 18
"""Elements of the target made at a time: few enough to stay in a core's
cache, enough for a write to be worth its call."""


def grow_tensor(
    weight: Tensor,
    name: str,
    layout: Layout,
    sizes: Mapping[str, int],
    copies: Mapping[str, int],
    shares: Shares,
) -> Iterator[Tensor]:
    """Grow one tensor.

    Args:
        weight: the source tensor, of shape ``layout.shape(sizes)``.
        name: the tensor's name, which seeds its random splits.
        layout: which axes the tensor reads and writes.
        sizes: size of every axis in the source.
        copies: number of copies of every grown axis; axes that are left out stay.
        shares: how read weights are split over the copies.

    Yields:
        Consecutive blocks of the target along dimension 0, about ``BLOCK_ELEMENTS`` elements each,
        so that memory stays near one source tensor.
    """
    assert tuple(weight.shape) == layout.shape(sizes), (name, weight.shape, layout)
    grown = {axis: size * copies.get(axis, 1) for axis, size in sizes.items()}
    generator = torch.Generator().manual_seed(shares.seed_of(name))
    first, *others = layout.dimensions

    if first.role is Role.WRITTEN:
        rows = _source_index(first, sizes, copies)
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
                block = block.index_select(position, _source_index(dimension, sizes, copies))
            else:
                block = _spread(block, position, dimension, sizes, copies, shares, generator)
        yield block


def _source_index(
    dimension: Dimension, sizes: Mapping[str, int], copies: Mapping[str, int]
) -> Tensor:
    """For every coordinate of the grown dimension, the source coordinate that it copies (E)."""
    indices: list[Tensor] = []
    offset = 0
    for factors in dimension.products:
        shape = [sizes[axis] for axis in factors]
        index = torch.arange(offset, offset + prod(shape)).view(shape)
        for position, axis in enumerate(factors):
            index = index.repeat_interleave(copies.get(axis, 1), position)
        indices.append(index.flatten())
        offset += prod(shape)
    return torch.cat(indices)


def _spread(
    block: Tensor,
    position: int,
    dimension: Dimension,
    sizes: Mapping[str, int],
    copies: Mapping[str, int],
    shares: Shares,
    generator: torch.Generator,
) -> Tensor:
    """Split a read dimension over its copies (L_in): the parts of a weight sum to it exactly."""
    (axes,) = dimension.products
    before, after = list(block.shape[:position]), list(block.shape[position + 1 :])
    shape = [sizes[axis] for axis in axes]
    factors = [copies.get(axis, 1) for axis in axes]
    parts = split(block, prod(factors), shares.amplitude, generator)

    grown = block.new_empty([*before, prod(shape) * prod(factors), *after])
    # [before, axis 0, its copies, axis 1, its copies, …, after], copies in front
    interleaved = [size for pair in zip(shape, factors, strict=True) for size in pair]
    slots = grown.view(before + interleaved + after)
    slots = slots.movedim(
        [len(before) + 2 * axis + 1 for axis in range(len(axes))], list(range(len(axes)))
    )
    for part, slot in zip(parts, product(*map(range, factors)), strict=True):
        slots[slot] = part.view(before + shape + after)
    return grown
