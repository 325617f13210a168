"""Transforms: how a tensor is computed from source tensors.

A transform computes any slice of its target, and recovers its source.
Growth and layouts use ``Mapped`` and ``Kept``, which recover their source bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from growkit.algebra.expansion import IndexMap, placed
from growkit.algebra.growth_law import Read, Rows, grow_slice, undo
from growkit.algebra.splits import Shares
from growkit.algebra.update_law import Update
from growkit.base.axes import Role
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import TORCH_NAMES, Weights, widened

Slices = Sequence[slice]
"""Start and stop in every dimension of a tensor."""

AS_IT_IS = "as it is"

PLAIN = Shares(None)
"""Even shares, without noise."""

AT_RANDOM = "it is split at random"
"""Reason why a tensor trains differently from its source."""


class Transform(ABC):
    """The computation of one target tensor from source tensors.

    Attributes:
        why: one phrase for users.
        holds: whether the source can be recovered bit for bit.
        like: name of the source that the target replaces, if it contains nothing of it.
        siblings: number of tensors that copy this source, each with an equal part of its gradient.
        dtype: dtype of the target; None for the first source's, or without sources for that of
            most tensors.
        refuses: whether ``part`` raises ``InputError`` for some values of a small tensor, so that
            it is computed before anything is written.
    """

    why: str
    dtype: str | None = None
    holds: bool = False
    like: str = ""
    siblings: int = 1
    refuses: bool = False

    @property
    def parts(self) -> Sequence[Transform]:
        """The transforms that this one is composed of; empty if it is not."""
        return ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source tensors."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.sources))

    @property
    def local(self) -> bool:
        """Whether a slice reads only the rows that it copies, not the whole source."""
        return all(part.local for part in self.parts)

    @property
    def reversible(self) -> bool:
        """Whether the one source can be recovered, be it by least squares (``undo``)."""
        return False

    @property
    def repeatable(self) -> bool:
        """Whether computing the target again gives the same bits on every machine.

        If not, the plan needs a check of the target's required properties.
        """
        return all(part.repeatable for part in self.parts)

    @abstractmethod
    def part(self, source: Weights, where: Slices) -> Tensor:
        """Compute a slice of the target.

        Args:
            source: holds the source tensors.
            where: start and stop in every dimension.
        """

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """Recover rows of the source, bit for bit; None if they are lost.

        Args:
            rows: reads rows of the target.
            of: the wanted rows of the source.
            nearest: whether to find, if ``reversible``, the rows whose target would be nearest to
                one that has changed; if nothing has, they are the source, bit for bit.
        """
        return None

    @abstractmethod
    def update(self, before: Sequence[Update]) -> Update:
        """Derive the training factors of the target.

        Args:
            before: the factors of each source, relative to the first source of the lineage.
        """


@dataclass(frozen=True, eq=False)
class _OneSource(Transform):
    """A transform of one source that can be recovered."""

    source: str

    holds = True

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True, eq=False)
class Kept(_OneSource):
    """An unchanged tensor, perhaps under another name or multiplied by a power of two.

    Attributes:
        factor: the power of two.
        why: one phrase for users.
        siblings: see ``Transform``.
        new: whether the target only starts as its source, and then trains independently of it.
    """

    factor: float = 1.0
    why: str = AS_IT_IS
    siblings: int = 1
    new: bool = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        return _multiply(source.read(self.source, *where), self.factor, source, self.source)

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``."""
        return _divide(rows(of), self.factor)

    @property
    def reversible(self) -> bool:
        """See ``Transform``; a target that trains independently says nothing about the source."""
        return not self.new

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        if self.new:
            return replace(before[0], new=True, why=self.why)
        return before[0].times(self.factor, self.siblings)


@dataclass(frozen=True, eq=False)
class Mapped(_OneSource):
    """A tensor whose coordinates are copied, split and moved, dimension by dimension.

    Attributes:
        make: computes the maps of all dimensions when they are needed.
        why: one phrase for users.
        name: the canonical name of the target, which seeds the random splits.
        shares: how read weights are split.
        factor: factor of every element; a power of two, except in ``Rounded``.
        alike: whether written copies serve one purpose, and are read with the shares of the maps.
        offset: number that the class adds to the vector; a zero is stored as minus this number.
        resets: whether an optimizer's moments restart for all copies but the first.
        diverges: whether copies in this tensor must diverge by themselves, not with other tensors.
    """

    make: Callable[[], tuple[IndexMap, ...]]
    why: str
    name: str = ""
    shares: Shares = PLAIN
    factor: float = 1.0
    alike: bool = True
    offset: float = 0.0
    resets: bool = False
    diverges: bool = True

    @property
    def maps(self) -> tuple[IndexMap, ...]:
        """The maps of every dimension."""
        return self.make()

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        grown = self._grown(partial(source.read, self.source), where)
        if self.offset:
            filled = widened(grown).masked_fill(self._zeros(where[0]), -self.offset)
            grown = filled.to(grown.dtype)
        return _multiply(grown, self.factor, source, self.source)

    def _grown(self, read: Read, where: Slices) -> Tensor:
        return grow_slice(read, self.maps, self.name, self.shares, where)

    def _zeros(self, rows: slice) -> Tensor:
        (mapped,) = self.maps
        return torch.from_numpy(mapped.nothing[rows])

    reversible = True

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``."""

        def without_offset(of: slice) -> Tensor:
            values = rows(of)
            return values.where(~self._zeros(of), values + self.offset)

        back = undo(without_offset if self.offset else rows, self.maps, of, nearest=nearest)
        return None if back is None else _divide(back, self.factor)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        update = before[0].times(self.factor).mapped(self.maps)
        if not self.alike:
            return update.because("its copies serve different purposes")
        splits = any(mapped.role is Role.READ and not mapped.identity for mapped in self.maps)
        if splits and self.shares.amplitude:
            update = update.because(AT_RANDOM)
        elif self.resets and any(mapped.later.any() for mapped in self.maps):
            update = update.because("moments of its copies restart")
        return update


@lru_cache(maxsize=64)  # sizes are few
def identity_map(size: int) -> IndexMap:
    """The map of a dimension that does not change."""
    return IndexMap(Role.WRITTEN, size, np.arange(size), np.ones(size))


@dataclass(frozen=True, eq=False)
class Rounded(Mapped):
    """``Mapped`` with any factor: every element is rounded once, so the source is lost."""

    holds = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        dtype = source.tensors[self.source].torch_dtype
        arithmetic = dtype if dtype.itemsize > 4 else torch.float32

        def read(rows: slice, columns: slice | None = None) -> Tensor:
            return source.read(self.source, rows, columns).to(arithmetic) + self.offset

        return (self._grown(read, where).double() * self.factor - self.offset).to(dtype)

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``."""
        return super().undo(rows, of, nearest=True) if nearest else None

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return super().update(before).because("it is rounded")


@dataclass(frozen=True)
class Constant(Transform):
    """A new tensor filled with one value, or a matrix with another one on its diagonal."""

    dtype: str = field()  # so that the base class's default is not inherited
    value: float
    why: str
    like: str = ""
    diagonal: float | None = None

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        shape = [part.stop - part.start for part in where]
        tensor = torch.full(shape, self.value, dtype=getattr(torch, TORCH_NAMES[self.dtype]))
        if self.diagonal is not None:
            rows, columns = (torch.arange(part.start, part.stop) for part in where)
            tensor[rows[:, None] == columns] = self.diagonal
        return tensor

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; ``before`` is that of ``like``, if there is one."""
        return replace(before[0] if before else Update(), new=True, why=self.why)


def _multiply(tensor: Tensor, factor: float, source: Weights, name: str) -> Tensor:
    """Multiply by a power of two without any loss.

    Raises:
        InputError: the dtype cannot represent a product.
    """
    if factor == 1:
        return tensor
    multiplied = (tensor.double() * factor).to(tensor.dtype)
    if not bool((_divide(multiplied, factor).double() == tensor.double()).all()):
        raise InputError(
            f"tensor {name} in {source.where(name)} must be multiplied by {factor:g}, which rounds "
            f"in {tensor.dtype}; pass a wider --dtype"
        )
    return multiplied


def _divide(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else (tensor.double() / factor).to(tensor.dtype)


@lru_cache(maxsize=64)  # layers are alike
def row_maps(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    role: Role = Role.WRITTEN,
    *,
    at: int = 0,
) -> tuple[IndexMap, ...]:
    """Make the maps of a tensor in which only rows, or coordinates of another dimension, are moved.

    Args:
        shape: shape of the source.
        order: for each row of the target, the row of the source.
        role: whether rows are written (copied) or read (split).
        at: the dimension, 0 for rows.
    """
    maps, moved = [*map(identity_map, shape)], placed(shape[at], order)
    maps[at] = IndexMap(role, moved.size, moved.source, moved.share)
    return tuple(maps)
