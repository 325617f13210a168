"""Named axes: the composition of a tensor's dimensions, and the direction of data flow.

A pattern follows the data flow, in the tensor's storage order:

=====================================================  ==========================================
``heads.head_dim <- hidden``                           a matrix that reads hidden (dimension 1) and
                                                       writes one row per head and head_dim
``vocab -> hidden``                                    an embedding: reads vocab, writes hidden
``hidden``                                             a vector that is written (a bias, a norm)
``<- hidden``                                          a vector whose elements are read
``signal_heads.head_dim + noise_heads.head_dim <- …``  rows of one kind, followed by another kind
``heads.(nope + value) <- latent``                     for each head, rows of one kind, then another
``heads, head_dim``                                    two dimensions
``experts: hidden -> ffn.two``                         one matrix for each expert: three dimensions
``()``                                                 a single number
=====================================================  ==========================================

A dot is a product (the last axis runs fastest), a plus means "followed by", and a comma separates
dimensions. A colon follows leading dimensions; each of their coordinates has one tensor of the
remaining pattern.

This module also defines storage orders, in which layouts arrange the rows of heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from math import prod


class Role(Enum):
    """The direction of data flow through a dimension."""

    WRITTEN = "written"
    READ = "read"


@dataclass(frozen=True)
class Axis:
    """A single axis as a dimension, or as a part of one."""

    name: str

    def size(self, sizes: Mapping[str, int]) -> int:
        """The length for these axis sizes."""
        return sizes[self.name]

    def axes(self) -> Iterator[str]:
        """Every axis in the form, with repetitions."""
        yield self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Composite:
    """Several forms in one dimension; see ``Axis``.

    Attributes:
        product: whether the parts form a product (the last one runs fastest), not a sequence.
        parts: the forms.
    """

    product: bool
    parts: tuple[Form, ...]

    def size(self, sizes: Mapping[str, int]) -> int:
        """See ``Axis``."""
        return (prod if self.product else sum)(part.size(sizes) for part in self.parts)

    def axes(self) -> Iterator[str]:
        """See ``Axis``."""
        for part in self.parts:
            yield from part.axes()

    def __str__(self) -> str:
        if not self.product:
            return " + ".join(map(str, self.parts))
        return ".".join(f"({p})" if isinstance(p, Composite) else str(p) for p in self.parts)


Form = Axis | Composite
"""The composition of a dimension from axes."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tensor."""

    role: Role
    form: Form

    def size(self, sizes: Mapping[str, int]) -> int:
        """The length of the dimension for these axis sizes."""
        return self.form.size(sizes)

    @property
    def axes(self) -> set[str]:
        """The axes of the dimension."""
        return set(self.form.axes())

    def __str__(self) -> str:
        return str(self.form)


@dataclass(frozen=True)
class Pattern:
    """The dimensions of one tensor, in storage order."""

    notation: str
    dimensions: tuple[Dimension, ...]

    @staticmethod
    @lru_cache(maxsize=4096)  # a model has as many tensors as layers, and few notations
    def parse(notation: str) -> Pattern:
        """Parse the notation of this module's docstring.

        Raises:
            ValueError: the notation is invalid; the message quotes it with position and reason.
        """
        return Pattern(notation, tuple(_Parser(notation).pattern()))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor for these axis sizes."""
        return tuple(dimension.size(sizes) for dimension in self.dimensions)

    def axes(self, role: Role) -> set[str]:
        """The axes that the tensor reads or writes."""
        return {axis for d in self.dimensions if d.role is role for axis in d.axes}


class _Parser:
    """Recursive-descent parser of one notation."""

    _TOKEN = re.compile(r"\s*(<-|->|[A-Za-z_][A-Za-z_0-9]*|[.,:+()])")

    def __init__(self, notation: str) -> None:
        self._notation = notation
        self._tokens: list[tuple[str, int]] = []
        at = 0
        while notation[at:].strip():
            match = self._TOKEN.match(notation, at)
            if not match:
                at += len(notation[at:]) - len(notation[at:].lstrip())
                raise self._error(f"{notation[at]!r} is not part of the notation", at)
            self._tokens.append((match[1], match.start(1)))
            at = match.end()

    def pattern(self) -> Iterator[Dimension]:
        tokens = [token for token, _ in self._tokens]
        if tokens == ["(", ")"]:
            return
        arrows = [token for token in tokens if token in ("<-", "->")]
        if len(arrows) > 1:
            raise self._error("there are two arrows")
        if ":" in tokens:
            yield from self._dimensions(Role.WRITTEN)
            self._expect(":")
        left, right = Role.WRITTEN, Role.READ
        if arrows == ["->"]:
            left, right = right, left
        if self._next not in ("<-", "->"):
            yield from self._dimensions(left)
        if arrows:
            self._expect(arrows[0])
            yield from self._dimensions(right)
        if self._next:
            raise self._error(f"{self._next!r} is not expected")

    def _dimensions(self, role: Role) -> Iterator[Dimension]:
        for form in self._series(self._sum, ","):
            yield Dimension(role, form)

    def _series(self, item: Callable[[], Form], sign: str) -> list[Form]:
        forms = [item()]
        while self._next == sign:
            self._expect(sign)
            forms.append(item())
        return forms

    def _sum(self) -> Form:
        terms = self._series(self._product, "+")
        return terms[0] if len(terms) == 1 else Composite(False, tuple(terms))

    def _product(self) -> Form:
        factors = self._series(self._factor, ".")
        return factors[0] if len(factors) == 1 else Composite(True, tuple(factors))

    def _factor(self) -> Form:
        if self._next == "(":
            self._expect("(")
            inner = self._sum()
            self._expect(")")
            return inner
        if not self._next.isidentifier():
            raise self._error("the name of an axis is missing")
        return Axis(self._tokens.pop(0)[0])

    @property
    def _next(self) -> str:
        return self._tokens[0][0] if self._tokens else ""

    def _expect(self, token: str) -> None:
        if self._next != token:
            raise self._error(f"{token!r} is missing")
        self._tokens.pop(0)

    def _error(self, why: str, at: int | None = None) -> ValueError:
        if at is None:
            at = self._tokens[0][1] if self._tokens else len(self._notation)
        return ValueError(f"pattern {self._notation!r}, at character {at + 1}: {why}")


Order = Callable[[Mapping[str, int]], list[int]]
"""A storage order: maps the axis sizes to the canonical row of every stored row.

In canonical order, all signal heads come before all noise heads. Within a head, the two halves that
RoPE rotates (if any) follow each other.
"""


def _in_groups(signal: int, noise: int) -> Iterator[int]:
    """Order each noise head right after its signal heads: [s, n, s, n, …] or [s, s, s, n, …]."""
    ratio = signal // noise
    for group in range(noise):
        yield from range(group * ratio, (group + 1) * ratio)
        yield signal + group


def _in_halves(heads: int, halves: int) -> Iterator[int]:
    """Order the first half of every head before the second half of every head."""
    for half in range(halves):
        yield from range(half, heads * halves, halves)


def _with_keys_and_values(queries: int, groups: int) -> Iterator[int]:
    """Order heads by group: the group's queries, then its key, then its value.

    In canonical order, all queries come first, then all keys, then all values.
    """
    ratio = queries // groups
    for group in range(groups):
        yield from range(group * ratio, (group + 1) * ratio)
        yield from (queries + group, queries + groups + group)


def _rows(heads: Callable[..., Iterable[int]], count: int, interleaved: bool, *axes: str) -> Order:
    """Make a storage order of rows from an order of heads.

    Args:
        heads: maps the sizes of the first axes to the canonical number of every stored head.
        count: number of these axes; the remaining axes are the rows of a head.
        interleaved: whether RoPE rotates neighbouring rows as pairs, not halves.
        *axes: names of the axes.
    """
    if len(axes) < count:
        raise TypeError(f"{count} axes are needed")

    def rows(sizes: Mapping[str, int]) -> list[int]:
        numbers = [sizes[axis] for axis in axes]
        width = prod(numbers[count:])
        inside = list(range(width))
        if interleaved:
            inside = [part * (width // 2) + pair for pair in range(width // 2) for part in range(2)]
        return [head * width + row for head in heads(*numbers[:count]) for row in inside]

    return rows


ORDERS: dict[str, Callable[..., Order]] = {
    "in_groups": partial(_rows, _in_groups, 2, False),
    "in_groups_interleaved": partial(_rows, _in_groups, 2, True),
    "head_by_head_interleaved": partial(_rows, range, 1, True),
    "in_halves": partial(_rows, _in_halves, 2, False),
    "with_keys_and_values": partial(_rows, _with_keys_and_values, 2, False),
}
"""Storage orders by name; each takes the names of its axes."""


def slopes(heads: int) -> list[Fraction]:
    """The ALiBi slope of every head as an exponent of ½ (arXiv 2108.12409)."""
    power = 1 << (heads.bit_length() - 1)
    first = [Fraction(8 * number, power) for number in range(1, power + 1)]
    return first + [Fraction(4 * number, power) for number in range(1, 2 * (heads - power), 2)]


def places_of_slopes(heads: int, more: int) -> list[int | None]:
    """For every head after growth, the present head with the same slope, or None.

    The slopes of fewer heads are a subset of the slopes of more heads. Heads with new slopes are
    copies that nothing reads yet.
    """
    numbers = {slope: number for number, slope in enumerate(slopes(heads))}
    return [numbers.get(slope) for slope in slopes(more)]


PLACES = {"slopes": places_of_slopes}
"""Placement functions for axes whose coordinates compute with their own number."""
