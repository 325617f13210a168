"""Transforms: how a tensor is computed from source tensors.

A transform computes any slice of its target, undoes what it did, and finds copies in its target.
Growth and layouts use ``Mapped`` and ``Kept``, which give their source back bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from growkit.algebra.axes import Role
from growkit.algebra.expansion import IndexMap, in_blocks, placed
from growkit.algebra.law import Read, Rows, copies_in, grow_moments, grow_slice, undo
from growkit.algebra.splits import Shares
from growkit.algebra.update import Update
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.tensors import TORCH_NAMES, Weights

Slices = Sequence[slice]
"""Begin and end in every dimension of a tensor."""

AS_IT_IS = "as it is"

PLAIN = Shares(None)
"""Parts without noise."""

AT_RANDOM = "it is split at random"
"""Why a tensor leaves the path of its source in training."""


@dataclass(frozen=True)
class Beside:
    """A tensor that goes with another one: a part of an adapter, with the weight that it changes.

    Attributes:
        source: its name.
        target: its name in the target, which seeds random splits.
        shape: in the source.
        dtype: safetensors name.
        dimensions: for each of its own the dimension of the weight that it follows, or None for one
            that stays; None as a whole if it takes the place of the weight.
        scaled: whether it takes what the weight is multiplied by.
        copied: whether it is copied where the weight is split.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[int | None, ...] | None = None
    scaled: bool = True
    copied: bool = False


class Transform(ABC):
    """How one tensor is made.

    Attributes:
        why: one phrase for users.
        holds: whether it gives its source back, bit for bit.
        like: name of the source in whose place it is, if it holds nothing of it.
        among: number of tensors that copy this source, each with an equal part of its gradient.
        dtype: of the target; None for that of the first source, or of most tensors without one.
    """

    why: str
    dtype: str | None = None
    holds: bool = False
    like: str = ""
    among: int = 1

    @property
    def parts(self) -> Sequence[Transform]:
        """The transforms that it is composed of, if it is."""
        return ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors that it is made from."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.sources))

    @property
    def local(self) -> bool:
        """Whether a slice needs only the rows of the source that it copies, not all of it."""
        return all(part.local for part in self.parts)

    @property
    def repeatable(self) -> bool:
        """Whether computing it again gives the same bits on every machine.

        If not, the plan needs a check of what must hold of it.
        """
        return all(part.repeatable for part in self.parts)

    @property
    def period(self) -> int | None:
        """The number of rows after which the same bits come again; None where they do not."""
        return None

    @abstractmethod
    def part(self, source: Weights, where: Slices) -> Tensor:
        """A part of the target.

        Args:
            source: has the tensors that it is made from.
            where: begin and end in every dimension.
        """

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Rows of the source, bit for bit; None if they are lost.

        Args:
            rows: reads rows of the target.
            of: the rows that are wanted, with begin and end.
        """
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """The copies in a tensor of the target's shape; see ``growkit.algebra.law.copies_in``."""
        return iter(())

    @abstractmethod
    def update(self, before: Sequence[Update]) -> Update:
        """How its updates follow from those of its sources.

        Args:
            before: how each of its sources is updated, relative to the source of the first step.
        """

    def moments(self, order: int) -> Transform | None:
        """How an optimizer's moments of the source become those of the target.

        They become the moments that the target would have gathered itself, as far as the gradients
        of copies are equal: for equal shares of as many copies of everything. Otherwise, and with
        noise, a norm mixes the gradients of copies, and they are an approximation.

        Args:
            order: 1 for means of gradients, 2 for means of their squares.

        Returns:
            A transform of the moments in the place of tensors; None if there is none.
        """
        return None

    def beside(self, one: Beside) -> Transform | None:
        """How a tensor that goes with the source is made to go with the target.

        An update of low rank goes through the same map as its weight: of W' = E · W · L its left
        factor takes E, its right one L.

        Returns:
            None if nothing follows for it.
        """
        return None


@dataclass(frozen=True, eq=False)
class _OfOne(Transform):
    """A transform of one source, which gives any part of it back."""

    source: str

    holds = True

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True, eq=False)
class Kept(_OfOne):
    """A tensor as it is, but for its name, or times a power of two.

    Attributes:
        factor: the power of two.
        why: one phrase for users.
        among: see ``Transform``.
        new: whether it only begins as its source, which trains on its own.
    """

    factor: float = 1.0
    why: str = AS_IT_IS
    among: int = 1
    new: bool = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        return _multiplied(source.read(self.source, *where), self.factor, source.where(self.source))

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        return _divided(rows(of), self.factor)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return (
            Update(new=True, why=self.why) if self.new else before[0].times(self.factor, self.among)
        )

    def moments(self, order: int) -> Transform | None:
        """Gradients of what is twice as large are half as large; see ``Transform``."""
        return None if self.new else Kept(self.source, (self.factor * self.among) ** -order)

    def beside(self, one: Beside) -> Transform:
        """See ``Transform``."""
        return replace(self, source=one.source, factor=self.factor if one.scaled else 1.0)


@dataclass(frozen=True, eq=False)
class Mapped(_OfOne):
    """A tensor whose coordinates are copied, split and moved, dimension by dimension.

    Attributes:
        make: gives the maps of every dimension, when they are needed.
        why: one phrase for users.
        name: seeds the random splits.
        shares: how read weights are split.
        factor: what everything is multiplied by: a power of two, unless it is ``Rounded``.
        alike: whether written copies serve one purpose, and are read with the shares of the maps.
        offset: what the class adds to a vector, so that zeros are stored as its negative.
        resets: whether an optimizer's moments of copies, of all but the first, begin anew.
        alone: whether the copies must part by themselves, rather than with other tensors.
    """

    make: Callable[[], tuple[IndexMap, ...]]
    why: str
    name: str = ""
    shares: Shares = PLAIN
    factor: float = 1.0
    alike: bool = True
    offset: float = 0.0
    resets: bool = False
    alone: bool = True

    @property
    def maps(self) -> tuple[IndexMap, ...]:
        """The maps of every dimension."""
        return self.make()

    @property
    def period(self) -> int | None:
        """Noise depends on the row; without, whole copies of written rows are the same."""
        rows = self.maps[0]
        if rows.role is not Role.WRITTEN or self.shares.snr_db is not None or self.offset:
            return None
        return rows.period

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        grown = self._grown(partial(source.read, self.source), where)
        if self.offset:
            grown = grown.masked_fill(self._nothing(where[0]), -self.offset)
        return _multiplied(grown, self.factor, source.where(self.source))

    def _grown(self, read: Read, where: Slices) -> Tensor:
        return grow_slice(read, self.maps, self.name, self.shares, where)

    def _nothing(self, rows: slice) -> Tensor:
        (mapped,) = self.maps
        return torch.from_numpy(mapped.nothing[rows])

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""

        def without_offset(of: slice) -> Tensor:
            found = rows(of)
            return found.where(~self._nothing(of), found + self.offset)

        back = undo(without_offset if self.offset else rows, self.maps, of)
        return None if back is None else _divided(back, self.factor)

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """See ``Transform``."""
        return copies_in(tensor, self.maps) if self.alone else iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        made = before[0].times(self.factor).mapped(self.maps)
        if not self.alike:
            return made.because("its copies play parts of their own")
        splits = any(each.role is Role.READ and not each.identity for each in self.maps)
        if splits and self.shares.amplitude:
            made = made.because(AT_RANDOM)
        elif self.resets and any(each.later.any() for each in self.maps):
            made = made.because("moments of its copies begin anew")
        return made

    def moments(self, order: int) -> Transform | None:
        """Copies have a part of the gradient, as they are read; see ``Transform``."""
        if not self.alike:
            return None
        return Moments(self.source, self.make, self.factor, order, self.resets)

    def beside(self, one: Beside) -> Transform | None:
        """See ``Transform``."""
        if one.dimensions is None:
            return replace(self, source=one.source, name=one.target)
        made = Mapped(one.source, partial(_followed, self.make, one), self.why, one.target)
        factor = self.factor if one.scaled else 1.0
        alike, resets, alone = self.alike, self.resets, self.alone
        return replace(
            made, shares=self.shares, factor=factor, alike=alike, resets=resets, alone=alone
        )


def _followed(make: Callable[[], tuple[IndexMap, ...]], one: Beside) -> tuple[IndexMap, ...]:
    """The maps of a tensor that goes with a weight, from those of the weight."""
    assert one.dimensions is not None
    found, pairs = make(), zip(one.dimensions, one.shape, strict=True)
    maps = [_unchanged(size) if d is None else found[d] for d, size in pairs]
    return tuple(replace(each, role=Role.WRITTEN) if one.copied else each for each in maps)


@lru_cache(maxsize=64)  # ranks are few
def _unchanged(size: int) -> IndexMap:
    return IndexMap(Role.WRITTEN, size, np.arange(size), np.ones(size))


@dataclass(frozen=True, eq=False)
class Rounded(Mapped):
    """The same with any factor: every element is rounded once, so that the source is lost."""

    holds = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        dtype = source.tensors[self.source].torch_dtype
        wide = torch.promote_types(dtype, torch.float32)

        def read(rows: slice, columns: slice | None = None) -> Tensor:
            return source.read(self.source, rows, columns).to(wide) + self.offset

        return (self._grown(read, where).double() * self.factor - self.offset).to(dtype)

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        return None

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return super().update(before).because("it is rounded")

    def beside(self, one: Beside) -> Transform | None:
        """See ``Transform``; what is not multiplied is not rounded."""
        made = super().beside(one)
        return Rounded(**vars(made)) if one.scaled and made else made


@dataclass(frozen=True, eq=False)
class Moments(_OfOne):
    """An optimizer's moments, where weights are copied and split: the dual of ``Mapped``.

    Attributes:
        make: see ``Mapped``; of the weights.
        factor: of the weights.
        order: see ``Transform.moments``.
        resets: see ``Mapped``.
    """

    make: Callable[[], tuple[IndexMap, ...]]
    factor: float
    order: int
    resets: bool = False
    why: str = "moments of copies"

    holds = False

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        read = partial(source.read, self.source)
        grown = grow_moments(read, self.make(), self.order, where, resets=self.resets)
        return grown if self.factor == 1 else grown * self.factor**-self.order

    def update(self, before: Sequence[Update]) -> Update:
        """Moments are not trained."""
        return before[0]


@dataclass(frozen=True)
class Computed(Transform):
    """A tensor from which its sources cannot be read off.

    Attributes:
        names: of the tensors that it is made from.
        why: one phrase for users.
        compute: takes the sources in order, whole, and gives the target.
        repeatable: see ``Transform``.
    """

    names: tuple[str, ...]
    why: str
    compute: Callable[..., Tensor]
    repeatable: bool = True
    dtype: str | None = None

    local = False

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return self.names

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``; everything is computed."""
        return self.compute(*map(source.read, self.names))[tuple(where)]

    def update(self, before: Sequence[Update]) -> Update:
        """Nothing follows for what is computed."""
        if not before:
            return Update(new=True, why=self.why)
        return before[0].because(f"it is computed ({self.why})")


@dataclass(frozen=True)
class Constant(Transform):
    """A new tensor, all of one value."""

    dtype: str = field()  # else the class's default is inherited
    value: float
    why: str
    like: str = ""

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        shape = [each.stop - each.start for each in where]
        return torch.full(shape, self.value, dtype=getattr(torch, TORCH_NAMES[self.dtype]))

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return Update(new=True, why=self.why)

    def moments(self, order: int) -> Transform:
        """A new tensor has gathered none."""
        return Constant(self.dtype, 0.0, self.why)

    def beside(self, one: Beside) -> Transform:
        """See ``Transform``; one factor of an update is zero, so that the other can train it."""
        if one.scaled:
            return Constant(one.dtype, self.value if one.dimensions is None else 0.0, self.why)
        return Kept(one.source, why=self.why, new=True)


@dataclass(frozen=True, eq=False)
class Section(Transform):
    """A rectangle of what another transform makes, such as a piece of an MLP.

    It does not give a source back, so a proof makes it again and compares.

    Attributes:
        whole: makes all of it.
        begin: where the rectangle begins in every dimension.
        why: one phrase for users.
    """

    whole: Transform
    begin: tuple[int, ...]
    why: str

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return (self.whole,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        moved = zip(where, self.begin, strict=True)
        return self.whole.part(source, [slice(w.start + b, w.stop + b) for w, b in moved])

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return self.whole.update(before).whole()

    def moments(self, order: int) -> Transform | None:
        """See ``Transform``."""
        whole = self.whole.moments(order)
        return None if whole is None else Section(whole, self.begin, self.why)

    def beside(self, one: Beside) -> Transform | None:
        """See ``Transform``."""
        of_all = replace(one, target=one.source)  # its parts sum up to one tensor
        whole, order = self.whole.beside(of_all), one.dimensions or range(len(self.begin))
        begin = tuple(0 if dimension is None else self.begin[dimension] for dimension in order)
        return None if whole is None else Section(whole, begin, self.why)


@dataclass(frozen=True, eq=False)
class Stacked(Transform):
    """Matrices, each composed of the rows of several, in one tensor of three dimensions.

    Attributes:
        matrices: for every matrix what makes its parts, and the number of rows of each.
        why: one phrase for users.
    """

    matrices: Sequence[Sequence[tuple[Transform, int]]]
    why: str

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return [part for parts in self.matrices for part, _ in parts]

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        numbers, rows, columns = where
        made = []
        for parts in self.matrices[numbers]:
            found, end = [], 0
            for part, count in parts:
                begin, end = end, end + count
                inside = slice(max(rows.start, begin) - begin, min(rows.stop, end) - begin)
                if inside.start < inside.stop:
                    found.append(part.part(source, (inside, columns)))
            made.append(torch.cat(found))
        return torch.stack(made)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        by_name = dict(zip(self.sources, before, strict=True))
        first, *others = (
            part.update([by_name[name] for name in part.sources]).whole() for part in self.parts
        )
        return first.because("its matrices train apart") if others else first

    def moments(self, order: int) -> Transform | None:
        """See ``Transform``."""
        made = [[(part.moments(order), rows) for part, rows in parts] for parts in self.matrices]
        known = [[(part, rows) for part, rows in parts if part] for parts in made]
        return Stacked(known, self.why) if known == made else None


def _multiplied(tensor: Tensor, factor: float, where: str) -> Tensor:
    """Multiply by a power of two without any loss.

    Raises:
        InputError: a number has no such multiple in its dtype.
    """
    if factor == 1:
        return tensor
    multiplied = (tensor.double() * factor).to(tensor.dtype)
    if not bool((_divided(multiplied, factor).double() == tensor.double()).all()):
        raise InputError(
            f"a tensor in {where} is to be multiplied by {factor:g}, which rounds in "
            f"{tensor.dtype}; pass a wider --dtype"
        )
    return multiplied


def _divided(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else (tensor.double() / factor).to(tensor.dtype)


@lru_cache(maxsize=64)  # layers are alike
def row_maps(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    role: Role = Role.WRITTEN,
    *,
    uneven: bool = False,
) -> tuple[IndexMap, ...]:
    """The maps of a tensor in which only rows are copied or moved.

    Args:
        shape: of the source.
        order: the source's number of every row.
        role: whether copies of rows are written, or parts of a row that is read.
        uneven: see ``IndexMap``.
    """
    first, *others = (placed(shape[0], order), *(in_blocks(size, 1) for size in shape[1:]))
    rows = IndexMap(role, first.size, first.source, first.share, uneven=uneven)
    return (rows, *(IndexMap(Role.WRITTEN, e.size, e.source, e.share) for e in others))
