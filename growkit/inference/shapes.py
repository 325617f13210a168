"""How every dimension of a class's tensors is composed of sizes, found by changing these.

A dimension is a sum of products of sizes. Each size alone is doubled, and several at once: what
changes with all of some sizes, and with no other, is the term of their product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

from growkit.inference.classes import ModelClass, not_inferred

Terms = dict[tuple[str, ...], int]
"""How often a dimension has the product of some sizes; that of none is a number."""

MOST = 5
"""Sizes that a dimension can depend on."""

ORDER = ("kv_heads", "heads", "head_dim")
"""Of the factors of a product, in storage; others come before."""

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


@dataclass(frozen=True)
class Composed:
    """A dimension, as sizes make it up.

    Attributes:
        terms: see ``Terms``.
    """

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def ways(self, width: bool) -> list[str]:
        """How it may be written as a pattern, the likeliest first.

        Args:
            width: whether heads times their size stands for hidden, where the class computes the
                one from the other.
        """
        written = [(_product(axes, width), count) for axes, count in self.terms]
        if len(written) == 1:
            (factors, count), *_ = written
            return _counted(factors, count)
        parts = [
            [".".join(factors)] * count if factors else [number(count)]
            for factors, count in written
        ]
        forward = [each for part in parts for each in part]
        backward = [each for part in reversed(parts) for each in part]
        return list(dict.fromkeys(" + ".join(each) for each in (forward, backward)))


def _product(axes: tuple[str, ...], width: bool) -> list[str]:
    if width and {"heads", "head_dim"} <= {*axes}:
        axes = (*(axis for axis in axes if axis not in ("heads", "head_dim")), "hidden")
    return sorted(axes, key=lambda axis: ORDER.index(axis) if axis in ORDER else -1)


def number(count: int) -> str:
    """What a number is called as an axis."""
    return NUMBERS.get(count, f"times_{count}")


def _counted(factors: list[str], count: int) -> list[str]:
    """A number of the same: around every factor, or beside it."""
    if count == 1:
        return [".".join(factors) or number(1)]
    if not factors:
        return [number(count)]
    places = [1, 0, len(factors)] if len(factors) > 1 else [0, 1]
    each = [[*factors[:at], number(count), *factors[at:]] for at in dict.fromkeys(places)]
    return [".".join(names) for names in each]


def composed(asked: ModelClass) -> dict[str, list[Composed]]:
    """Every dimension of every tensor of a small model.

    Raises:
        InputError: one is no sum of products of sizes.
    """
    here = asked.shapes(asked.small)
    assert here is not None
    axes = [axis for axis in asked.small if axis != "layers"]
    if asked.square:
        axes.remove("hidden")
    moved = {axis: _shapes(asked, (axis,)) for axis in axes}
    found = {}
    for name, shape in here.items():
        dimensions = []
        for at, size in enumerate(shape):
            relevant = [
                a for a in axes if moved[a] is None or moved[a].get(name, shape)[at] != size
            ]
            dimensions.append(_composed(asked, name, at, relevant))
        found[name] = dimensions
    return found


def _shapes(asked: ModelClass, doubled: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    sizes = asked.small | {axis: 2 * asked.small[axis] for axis in doubled}
    found = asked.shapes(sizes)
    if found is None:
        raise not_inferred(
            f"{asked.name} has no model in which {' and '.join(doubled)} alone are twice as much"
        )
    return dict(found)


def _composed(asked: ModelClass, name: str, at: int, axes: list[str]) -> Composed:
    if len(axes) <= MOST:
        values = {some: _shapes(asked, some)[name][at] for some in _subsets(axes)}
        changes = {
            some: sum((-1) ** (len(some) - len(few)) * values[few] for few in _subsets(some))
            for some in values
        }
        parts = {
            some: sum(
                (-1) ** (len(more) - len(some)) * changes[more]
                for more in values
                if {*some} <= {*more}
            )
            for some in values
        }
        terms = []
        for some, part in parts.items():
            count, rest = divmod(part, prod(asked.small[axis] for axis in some))
            if rest or count < 0:
                break
            terms += [(some, count)] if count else []
        else:
            return Composed(tuple(sorted(terms, key=lambda term: "kv_heads" in term[0])))
    raise not_inferred(
        f"dimension {at + 1} of tensor {name} of a {asked.name} model is no sum of products of "
        f"sizes ({', '.join(axes)})"
    )


def _subsets(axes: list[str] | tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)
