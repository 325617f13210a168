"""The law of growth for any index map: copies, parts, zeros, in any arrangement and dtype.

Held against the definition, element by element, in numpy.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from growkit.algebra.expansion import (
    NOTHING,
    Expansion,
    IndexMap,
    in_blocks,
    index_map,
    placed,
    uneven,
)
from growkit.algebra.growth_law import grow_slice, undo
from growkit.algebra.splits import Shares
from growkit.base.axes import Pattern, Role
from growkit.base.tensors import cut
from growkit.extras.optimizer.checks.trainability import copies_in
from tests.files import listed
from tests.models import seeded

NOTATIONS = ["a.b <- c", "c -> a.b", "a", "<- c", "a + b.a <- c", "a.(b + c) <- d", "a, b"]
NOTATIONS += ["e: c -> a.b", "e: a.b <- c", "c -> a, b"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def expansion(size: int, chance: Random) -> Expansion:
    kind = chance.randrange(6)
    if kind == 0:
        return in_blocks(size, chance.randrange(1, 5))
    if kind == 1:
        return uneven(size, size * chance.randrange(1, 5), groups=True)
    if kind == 2:
        return uneven(size, chance.randrange(size, 3 * size), groups=chance.random() < 0.5)
    if kind == 3:
        return placed(size, [*range(size), *[NOTHING] * chance.randrange(4)])
    least = NOTHING if kind == 4 else 0
    others = [chance.randrange(least, size) for _ in range(chance.randrange(size + 1))]
    share = [np.nan] * (size + len(others)) if kind == 4 else [1.0] * size + [0.0] * len(others)
    order = chance.sample(range(len(share)), len(share))
    source = [*range(size), *others]
    return placed(size, [source[i] for i in order], [share[i] for i in order])


def law(chance: Random) -> tuple[list[IndexMap], list[int]]:
    """The maps of a random tensor, and its shape."""
    sizes = {axis: chance.randrange(1, 7) for axis in "abcde"}
    expansions = {axis: expansion(sizes[axis], chance) for axis in "abcde" if chance.random() < 0.6}
    pattern, maps = Pattern.parse(chance.choice(NOTATIONS)), []
    for dimension in pattern.dimensions:
        made = index_map(dimension, sizes, expansions)
        if chance.random() < 0.3:  # stored in an order of its own
            orders = [chance.sample(range(n), n) for n in (made.size, len(made))]
            made = index_map(dimension, sizes, expansions, (orders[0], orders[1]))
        maps.append(made)
    return maps, list(pattern.shape(sizes))


def along(axis: int, index: object, array: NDArray[np.float64]) -> tuple[object, ...]:
    return (*[slice(None)] * axis, index, *[slice(None)] * (array.ndim - axis - 1))


def read_together(grown: NDArray[np.float64], maps: Sequence[IndexMap]) -> NDArray[np.float64]:
    """What reads the grown tensor's copies of one coordinate gets: the sum of their weights."""
    for axis, each in enumerate(maps):
        if each.role is Role.READ:
            shape = list(grown.shape)
            shape[axis] = each.size
            total = np.zeros(shape)
            for target, source in enumerate(each.source):
                if source != NOTHING:
                    total[along(axis, source, total)] += grown[along(axis, target, grown)]
            grown = total
    return grown


def repeated(weight: NDArray[np.float64], maps: Sequence[IndexMap]) -> NDArray[np.float64]:
    """What is written, for every copy; nothing where nothing is copied."""
    for axis, each in enumerate(maps):
        if each.role is Role.WRITTEN:
            weight = np.take(weight, np.maximum(each.source, 0), axis=axis)
            weight[along(axis, each.source == NOTHING, weight)] = 0
    return weight


@pytest.mark.parametrize("seed", range(150))
def test_any_slice_of_any_map(seed: int) -> None:
    chance = seeded(seed)
    maps, shape = law(chance)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(chance.choice(DTYPES))
    shares = Shares(chance.choice([None, 10.0, 6.0]), seed)
    read: list[set[tuple[int, int]]] = []

    def rows(wanted: slice, columns: slice | None = None) -> Tensor:
        width = shape[1] if len(shape) > 1 else 1
        chosen = range(width)[columns or slice(None)]
        read.append({(i, j) for i in range(wanted.start, wanted.stop) for j in chosen})
        return cut(weight, (wanted, columns))

    grown = grow_slice(rows, maps, "name", shares, [slice(0, len(each)) for each in maps])
    assert grown.dtype == weight.dtype
    wide, source = grown.double().numpy(), weight.double().numpy()
    # Sums of a few numbers of a storage format are exact in float64, but for float64 itself.
    total, expected = read_together(wide, maps), repeated(source, maps)
    assert np.abs(total - expected).max(initial=0) <= (
        0 if weight.dtype != torch.float64 else 1e-15 * np.abs(source).max(initial=0)
    )
    for _ in range(3):
        where = [slice(*sorted(chance.choices(range(len(m) + 1), k=2))) for m in maps]
        read.clear()
        part = grow_slice(rows, maps, "name", shares, where)
        assert part.float().equal(grown[tuple(where)].float())
        needed = [set(m.source[w].tolist()) - {NOTHING} for m, w in zip(maps, where, strict=True)]
        columns = needed[1] if len(needed) > 1 else {0}
        assert set().union(*read) == {(i, j) for i in needed[0] for j in columns}
    wanted = slice(*sorted(chance.choices(range(shape[0] + 1), k=2)))
    for of in (slice(0, shape[0]), wanted):
        back = undo(grown.__getitem__, maps, of)
        assert back.float().equal(weight[of].float())
    for copies in copies_in(grown, maps):
        assert len(copies) > 1
        if all(each.identity for each in maps if each.role is Role.READ):
            assert all(copy.float().equal(copies[0].float()) for copy in copies)
    if weight.dtype.itemsize > 1:
        spoiled = grown.clone()
        number = chance.randrange(grown.numel())
        spoiled.view(-1)[number] = 1.5 * spoiled.view(-1)[number] + 1
        back = undo(spoiled.__getitem__, maps, slice(0, shape[0]))
        assert back is None or not back.equal(weight)


@pytest.mark.parametrize(
    ("notation", "why"), listed("expansion", "a wrong notation is quoted with the reason")
)
def test_a_wrong_notation_is_quoted_with_the_reason(notation: str, why: str) -> None:
    with pytest.raises(ValueError, match="pattern") as error:
        Pattern.parse(notation)
    assert why in str(error.value)
    assert repr(notation) in str(error.value)
