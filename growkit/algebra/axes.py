"""Named axes: how a tensor's dimensions are composed, and which way data flows through it.

A pattern is written the way data flows, in the tensor's storage order:

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
=====================================================  ==========================================

A dot is a product (the last axis runs fastest), a plus stands for "followed by", a comma separates
dimensions, and a colon stands behind the dimensions of which there is one of the rest for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod


class Role(Enum):
    """What a tensor does with one of its dimensions."""

    WRITTEN = "written"
    READ = "read"


@dataclass(frozen=True)
class Axis:
    """A dimension, or a part of one, that is a single axis."""

    name: str

    def size(self, sizes: Mapping[str, int]) -> int:
        """Its length when the axes have these sizes."""
        return sizes[self.name]

    def axes(self) -> Iterator[str]:
        """Every axis that takes part, as often as it does."""
        yield self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Product:
    """For each coordinate of the first factor all of the next; see ``Axis``."""

    factors: tuple[Form, ...]

    def size(self, sizes: Mapping[str, int]) -> int:
        """The product of the factors' lengths."""
        return prod(factor.size(sizes) for factor in self.factors)

    def axes(self) -> Iterator[str]:
        """See ``Axis``."""
        for factor in self.factors:
            yield from factor.axes()

    def __str__(self) -> str:
        inner = (f"({each})" if isinstance(each, Sum) else str(each) for each in self.factors)
        return ".".join(inner)


@dataclass(frozen=True)
class Sum:
    """One after the other; see ``Axis``."""

    terms: tuple[Form, ...]

    def size(self, sizes: Mapping[str, int]) -> int:
        """The sum of the terms' lengths."""
        return sum(term.size(sizes) for term in self.terms)

    def axes(self) -> Iterator[str]:
        """See ``Axis``."""
        for term in self.terms:
            yield from term.axes()

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


Form = Axis | Product | Sum
"""How a dimension is composed of axes."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tensor."""

    role: Role
    form: Form

    def size(self, sizes: Mapping[str, int]) -> int:
        """The length of the dimension when its axes have these sizes."""
        return self.form.size(sizes)

    @property
    def axes(self) -> set[str]:
        """Every axis that takes part."""
        return set(self.form.axes())

    def __str__(self) -> str:
        return str(self.form)


@dataclass(frozen=True)
class Pattern:
    """The dimensions of one tensor, in storage order."""

    notation: str
    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, notation: str) -> Pattern:
        """Read the notation of this module's docstring.

        Raises:
            ValueError: it is none; quotes it and says where and why.
        """
        return _parsed(notation)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor in a model whose axes have these sizes."""
        return tuple(dimension.size(sizes) for dimension in self.dimensions)

    def axes(self, role: Role) -> set[str]:
        """The axes that the tensor reads, or those that it writes."""
        return {axis for d in self.dimensions if d.role is role for axis in d.axes}


@lru_cache(maxsize=4096)  # a model has as many tensors as layers, and few notations
def _parsed(notation: str) -> Pattern:
    parser = _Parser(notation)
    return Pattern(notation, tuple(parser.pattern()))


class _Parser:
    """Reads one notation from left to right."""

    _TOKEN = re.compile(r"\s*(<-|->|[A-Za-z_][A-Za-z_0-9]*|[.,:+()])")

    def __init__(self, notation: str) -> None:
        self._notation = notation
        self._tokens: list[tuple[str, int]] = []
        at = 0
        while notation[at:].strip():
            found = self._TOKEN.match(notation, at)
            if not found:
                at += len(notation[at:]) - len(notation[at:].lstrip())
                raise self._error(f"{notation[at]!r} is not part of the notation", at)
            self._tokens.append((found[1], found.start(1)))
            at = found.end()

    def pattern(self) -> Iterator[Dimension]:
        tokens = [token for token, _ in self._tokens]
        arrows = [token for token in tokens if token in ("<-", "->")]
        if len(arrows) > 1:
            raise self._error("there are two arrows")
        if ":" in tokens:
            for form in self._dimensions():
                yield Dimension(Role.WRITTEN, form)
            self._expect(":")
        left, right = Role.WRITTEN, Role.READ
        if arrows == ["->"]:
            left, right = right, left
        if self._next not in ("<-", "->"):
            for form in self._dimensions():
                yield Dimension(left, form)
        if arrows:
            self._expect(arrows[0])
            for form in self._dimensions():
                yield Dimension(right, form)
        if self._next:
            raise self._error(f"{self._next!r} is not expected")

    def _dimensions(self) -> Iterator[Form]:
        yield self._sum()
        while self._next == ",":
            self._take()
            yield self._sum()

    def _sum(self) -> Form:
        terms = [self._product()]
        while self._next == "+":
            self._take()
            terms.append(self._product())
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _product(self) -> Form:
        factors = [self._factor()]
        while self._next == ".":
            self._take()
            factors.append(self._factor())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def _factor(self) -> Form:
        if self._next == "(":
            self._take()
            inner = self._sum()
            self._expect(")")
            return inner
        if not self._next.isidentifier():
            raise self._error("the name of an axis is missing")
        return Axis(self._take())

    @property
    def _next(self) -> str:
        return self._tokens[0][0] if self._tokens else ""

    def _take(self) -> str:
        return self._tokens.pop(0)[0]

    def _expect(self, token: str) -> None:
        if self._next != token:
            raise self._error(f"{token!r} is missing")
        self._take()

    def _error(self, why: str, at: int | None = None) -> ValueError:
        if at is None:
            at = self._tokens[0][1] if self._tokens else len(self._notation)
        return ValueError(f"pattern {self._notation!r}, at character {at + 1}: {why}")


Order = Callable[[Mapping[str, int]], list[int]]
"""From the size of every axis to the canonical row of every stored row."""


def in_groups(signal: str, noise: str, *width: str, interleaved: bool = False) -> Order:
    """Each noise head right after its signal heads: [s, n, s, n, …] or [s, s, s, n, …].

    Args:
        signal: axis of the signal heads, of which each noise head has the same number.
        noise: axis of the noise heads.
        *width: axes of the rows of a head.
        interleaved: whether RoPE turns neighbours inside a head, rather than halves.
    """

    def order(sizes: Mapping[str, int]) -> list[int]:
        signals, noises = sizes[signal], sizes[noise]
        ratio = signals // noises
        heads = [
            head
            for group in range(noises)
            for head in (*range(group * ratio, (group + 1) * ratio), signals + group)
        ]
        return _rows(heads, prod(sizes[axis] for axis in width), interleaved)

    return order


def head_by_head(heads: str, *width: str, interleaved: bool = False) -> Order:
    """Heads in their canonical order; see ``in_groups`` for the rest."""

    def order(sizes: Mapping[str, int]) -> list[int]:
        return _rows(list(range(sizes[heads])), prod(sizes[axis] for axis in width), interleaved)

    return order


def in_halves(heads: str, half: str, *width: str) -> Order:
    """The first half of every head, then the second half of every head."""

    def order(sizes: Mapping[str, int]) -> list[int]:
        count, halves = sizes[heads], sizes[half]
        blocks = [head * halves + part for part in range(halves) for head in range(count)]
        return _rows(blocks, prod(sizes[axis] for axis in width), interleaved=False)

    return order


def with_keys_and_values(heads: str, kv_heads: str, *width: str) -> Order:
    """The query heads of a group, then the key and the value that serve them, group by group.

    Canonically all queries stand first, then all keys, then all values.
    """

    def order(sizes: Mapping[str, int]) -> list[int]:
        queries, groups = sizes[heads], sizes[kv_heads]
        each = queries // groups
        stored = [
            head
            for group in range(groups)
            for head in (
                *range(group * each, (group + 1) * each),
                queries + group,
                queries + groups + group,
            )
        ]
        return _rows(stored, prod(sizes[axis] for axis in width), interleaved=False)

    return order


def _rows(heads: list[int], width: int, interleaved: bool) -> list[int]:
    """The rows of heads; neighbours that RoPE turns as pairs come from halves."""
    inside = list(range(width))
    if interleaved:
        inside = [part * (width // 2) + pair for pair in range(width // 2) for part in range(2)]
    return [head * width + row for head in heads for row in inside]
