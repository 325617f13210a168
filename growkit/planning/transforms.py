"""All transforms.

Growth and layouts use ``Mapped`` and ``Kept``, from which the source can be recovered. It cannot be
read off what ``Computed`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from growkit.algebra.axes import Role
from growkit.algebra.shares import Shares
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import TORCH_NAMES, TensorInfo, Weights
from growkit.planning.transform import Slices, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import IndexMap
    from growkit.algebra.law import Rows
    from growkit.planning.update import Update

PLAIN = Shares(None)
"""Parts without noise."""

AT_RANDOM = "it is split at random"
"""Why a tensor leaves the path of its source in training."""


@dataclass(frozen=True, eq=False)
class _Holding:
    """What holds one source, and can be asked for any part of it.

    Attributes:
        source: the name of what it is made from.
    """

    source: str

    local = True
    holds = True
    repeatable = True
    among = 1

    @property
    def period(self) -> int | None:
        """See ``Transform``."""
        return None

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return (self.source,)


AS_IT_IS = "as it is"


@dataclass(frozen=True, eq=False)
class Kept(_Holding):
    """A tensor as it is, but for its name, or times a power of two."""

    factor: float = 1.0
    why: str = AS_IT_IS
    among: int = 1

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        found = source.read(self.source, *where)
        return _multiplied(found, self.factor, source.where(self.source))

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        return _divided(rows(of), self.factor)

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is copied."""
        return iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        return before[0].times(self.factor).shared(self.among)

    def moments(self, order: int) -> Transform | None:
        """Gradients of what is twice as large are half as large; see ``Transform``."""
        return Kept(self.source, (self.factor * self.among) ** -order)


@dataclass(frozen=True, eq=False)
class Mapped(_Holding):
    """A tensor whose coordinates are copied, split and put elsewhere, dimension by dimension.

    Attributes:
        make: gives the maps of every dimension, when they are needed.
        why: one phrase for people.
        name: seeds the random splits.
        shares: how read weights are split.
        factor: a power of two by which everything is multiplied.
        alike: whether what is written is read with the shares of the maps; else copies play parts
            of their own in what is computed.
        offset: what the class adds to a vector: where it should have nothing, there is less.
        resets: whether moments of copies, of all but the first, begin anew.
    """

    make: Callable[[], tuple[IndexMap, ...]]
    why: str
    name: str = ""
    shares: Shares = PLAIN
    factor: float = 1.0
    alike: bool = True
    offset: float = 0.0
    resets: bool = False

    @property
    def maps(self) -> tuple[IndexMap, ...]:
        """Of every dimension."""
        return self.make()

    @property
    def period(self) -> int | None:
        """Noise depends on the row; without, whole copies of written rows are the same."""
        from growkit.algebra.axes import Role

        rows = self.maps[0]
        if rows.role is not Role.WRITTEN or self.shares.snr_db is not None or self.offset:
            return None
        return rows.period

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        from growkit.algebra.law import grow

        read = partial(source.read, self.source)
        grown = grow(read, self.maps, self.name, self.shares, where)
        if self.offset:
            grown = grown.masked_fill(self._nothing(where[0]), -self.offset)
        return _multiplied(grown, self.factor, source.where(self.source))

    def _nothing(self, rows: slice) -> Tensor:
        import torch

        (mapped,) = self.maps
        return torch.from_numpy(mapped.nothing[rows])

    def _without_offset(self, rows: Rows, of: slice) -> Tensor:
        found, nothing = rows(of), self._nothing(of)
        return found.where(~nothing, found + self.offset)

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        from growkit.algebra.law import undo

        rows = partial(self._without_offset, rows) if self.offset else rows
        back = undo(rows, self.maps, of)
        return None if back is None else _divided(back, self.factor)

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """See ``Transform``."""
        from growkit.algebra.law import copies_in

        return copies_in(tensor, self.maps)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        made = before[0].times(self.factor).mapped(self.maps)
        if not self.alike:
            return made.because("its copies play parts of their own")
        splits = any(each.role is Role.READ and not each.identity for each in self.maps)
        if splits and self.shares.amplitude:
            return made.because(AT_RANDOM)
        if self.resets and any(each.later.any() for each in self.maps):
            return made.because("moments of its copies begin anew")
        return made

    def moments(self, order: int) -> Transform | None:
        """Copies have a part of the gradient, as they are read; see ``Transform``."""
        if not self.alike:
            return None
        return Moments(self.source, self.make, self.factor, order, self.resets)


@dataclass(frozen=True, eq=False)
class Moments(_Holding):
    """An optimizer's moments, where weights are copied and split: the dual of ``Mapped``.

    Attributes:
        make: of the weights.
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
        from growkit.algebra.law import grow_moments

        read = partial(source.read, self.source)
        grown = grow_moments(read, self.make(), self.order, where, resets=self.resets)
        return grown if self.factor == 1 else grown * self.factor**-self.order

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Nothing comes back bit for bit."""
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is asked of them."""
        return iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """Nothing is asked of them."""
        return before[0]

    def moments(self, order: int) -> Transform | None:
        """There are none of moments."""
        return None


def _multiplied(tensor: Tensor, factor: float, where: str) -> Tensor:
    """Times a power of two, of which nothing is lost.

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


def reordered(source: str, shape: Sequence[int], order: Sequence[int]) -> Mapped:
    """A tensor whose rows stand in another order; ``order`` says for each where it came from."""
    return Mapped(source, partial(_of_rows, tuple(shape), tuple(order)), "rows in another order")


def twice(source: str, shape: Sequence[int], why: str) -> Mapped:
    """A tensor whose rows come twice, for two purposes; ``shape`` is that of the source."""
    rows = partial(_of_rows, tuple(shape), (*range(shape[0]),) * 2)
    return Mapped(source, rows, why, alike=False)


@lru_cache(maxsize=64)  # layers are alike
def _of_rows(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[IndexMap, ...]:
    """The maps of a tensor of which only the rows are put elsewhere."""
    from growkit.algebra.expansion import IndexMap, in_blocks, placed

    every = (placed(shape[0], order), *(in_blocks(size, 1) for size in shape[1:]))
    return tuple(IndexMap(Role.WRITTEN, each.size, each.source, each.share) for each in every)


@dataclass(frozen=True)
class Computed:
    """A tensor that holds nothing of its sources which could be read off.

    Attributes:
        sources: names of the tensors that it is made from.
        why: one phrase for people.
        compute: takes the sources in order, whole, and gives the target.
        repeatable: see ``Transform``.
    """

    sources: tuple[str, ...]
    why: str
    compute: Callable[..., Tensor]
    repeatable: bool = True

    local = False
    holds = False
    among = 1

    @property
    def period(self) -> int | None:
        """See ``Transform``."""
        return None

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``; everything is computed."""
        whole = self.compute(*(source.read(name) for name in self.sources))
        return whole[tuple(where)]

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """Nothing comes back."""
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is copied."""
        return iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """Nothing follows for what is computed."""
        from growkit.planning.update import Update

        return (
            Update.begun(self.why)
            if not before
            else before[0].because(f"it is computed ({self.why})")
        )

    def moments(self, order: int) -> Transform | None:
        """They do not go through what is computed."""
        return None


@dataclass(frozen=True)
class Constant:
    """A new tensor, all of one value."""

    info: TensorInfo
    value: float
    why: str

    sources = ()
    local = True
    holds = False
    repeatable = True
    among = 1

    @property
    def period(self) -> int | None:
        """See ``Transform``."""
        return None

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        import torch

        shape = [each.stop - each.start for each in where]
        return torch.full(shape, self.value, dtype=getattr(torch, TORCH_NAMES[self.info.dtype]))

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """There is nothing to come back."""
        return None

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is copied."""
        return iter(())

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``."""
        from growkit.planning.update import Update

        return Update.begun(self.why)

    def moments(self, order: int) -> Transform:
        """A new tensor has gathered none."""
        return Constant(self.info, 0.0, self.why)
