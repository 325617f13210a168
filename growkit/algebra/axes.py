"""Named axes: how a tensor's dimensions are composed, and which way data flows through it.

A layout is written the way data flows, in the tensor's storage order:

=====================================================  ==========================================
``heads.head_dim <- hidden``                           a matrix that reads hidden (dimension 1) and
                                                       writes one row per head and head_dim
``vocab -> hidden``                                    an embedding: reads vocab, writes hidden
``hidden``                                             a vector that is written (a bias, a norm)
``<- hidden``                                          a vector whose elements are read
``signal_heads.head_dim + noise_heads.head_dim <- …``  rows of one kind, followed by another kind
=====================================================  ==========================================

A dot is a product (the last axis runs fastest), a plus stands for "followed by".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod


class Role(Enum):
    """What a tensor does with one of its dimensions."""

    WRITTEN = "written"
    READ = "read"


@dataclass(frozen=True)
class Dimension:
    """One dimension of a tensor: products of axes, one after the other."""

    role: Role
    products: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str, role: Role) -> Dimension:
        """Read ``a.b + c``: the axes of one side of a layout."""
        products = tuple(
            tuple(axis.strip() for axis in product.split(".")) for product in text.split("+")
        )
        assert all(axis.isidentifier() for product in products for axis in product), text
        return cls(role, products)

    def size(self, sizes: Mapping[str, int]) -> int:
        """The length of the dimension when its axes have these sizes."""
        return sum(prod(sizes[axis] for axis in product) for product in self.products)

    @property
    def axes(self) -> set[str]:
        """Every axis that takes part."""
        return {axis for product in self.products for axis in product}

    def __str__(self) -> str:
        return " + ".join(".".join(product) for product in self.products)


@dataclass(frozen=True)
class Layout:
    """The dimensions of one tensor, in storage order."""

    notation: str
    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, notation: str) -> Layout:
        """Read the notation of this module's docstring."""
        if "<-" in notation:
            left, right = Role.WRITTEN, Role.READ
            parts = notation.split("<-")
        elif "->" in notation:
            left, right = Role.READ, Role.WRITTEN
            parts = notation.split("->")
        else:
            return cls(notation, (Dimension.parse(notation, Role.WRITTEN),))
        sides = zip(parts, (left, right), strict=True)
        return cls(
            notation,
            tuple(Dimension.parse(text, role) for text, role in sides if text.strip()),
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor in a model whose axes have these sizes."""
        return tuple(dimension.size(sizes) for dimension in self.dimensions)

    def axes(self, role: Role) -> set[str]:
        """The axes that the tensor reads, or those that it writes."""
        return {axis for d in self.dimensions if d.role is role for axis in d.axes}
