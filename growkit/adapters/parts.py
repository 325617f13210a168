"""The tensors of an adapter, and the tensors in a model's files with which each grows.

The class may have in one parameter what files hold in several tensors: experts. Its factors are
taken apart into those of each tensor, and put together again for the class, as moments of
optimizers are (``growkit.optimizer.growing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from torch import Tensor

from growkit.adapters.folder import AdapterFolder
from growkit.adapters.methods import COLUMNS, IN, MERGE, OUT, RANK, Part
from growkit.adapters.modules import Modules, experts_of
from growkit.base.errors import InputError
from growkit.base.tensors import ANYWHERE, FLOAT_BYTES, TensorInfo, Weights, cut
from growkit.planning.transforms import Beside

PREFIX, INSIDE = "base_model.model.", ".base_layer"
"""What PEFT puts before the name of a module, and behind it for each wrap around the module."""

WHOLE_MODEL = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
"""Where a multimodal class has the language model inside, which is grown alone."""

LINEAR = {OUT: 0, IN: 1, COLUMNS: 1}
"""Dimensions of the weight of a linear layer."""

WHOLE = Part((), scaled=True)
"""A tensor that takes the place of the model's."""


@dataclass(frozen=True)
class Entry:
    """A tensor of an adapter, or the part of it that goes with a single tensor of a model's files.

    Attributes:
        tensor: name of the tensor in the model's files.
        parameter: the class's parameter; empty if the adapter goes by names in files.
        tail: the end of its name in the adapter, behind that of the module.
        info: its header.
        part: what kind of tensor it is.
        dimensions: see ``Beside``.
        tied: whether the parameter has its tensor from another one.
        origin: the source's parameter, or tensor, which it adapts.
    """

    tensor: str
    parameter: str
    tail: str
    info: TensorInfo
    part: Part = WHOLE
    dimensions: tuple[int | None, ...] | None = None
    tied: bool = False
    origin: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """A name that no other entry has."""
        return f"{self.tensor}{f':{self.parameter}' * self.tied}{self.tail}"

    @property
    def key(self) -> str:
        """The name of its tensor in the adapter."""
        module = (self.parameter or self.tensor).rpartition(".")[0]
        return f"{PREFIX}{module}{self.tail}"

    def beside(self, target: str) -> Beside:
        """How it grows with its tensor."""
        part, info = self.part, self.info
        how = self.dimensions, part.scaled, part.copied
        return Beside(self.name, target, info.shape, info.dtype, *how)


class _Piece(NamedTuple):
    """Where an entry is in the adapter's file: its tensor, in another shape, and a part of that."""

    key: str
    view: tuple[int, ...] | None = None
    where: tuple[slice | int, ...] = (slice(None),)


class Parts(Weights):
    """The tensors of an adapter, each with one of the model's files.

    Args:
        adapter: the adapter.
        modules: of its model.

    Attributes:
        entries: all of them, by name.

    Raises:
        InputError: a tensor is of no parameter of the model, or does not fit.
    """

    def __init__(self, adapter: AdapterFolder, modules: Modules) -> None:
        self.adapter, self._modules, self.config = adapter, modules, {}
        self.entries: dict[str, Entry] = {}
        self._pieces: dict[str, _Piece] = {}
        self._ranks: dict[str, int] = {}
        ends = "|".join(map(re.escape, adapter.method.parts))
        known = re.compile(rf"(.*?)((?:{re.escape(INSIDE)})*)\.({ends})")
        for key in adapter.file.tensors:
            around, name = self._inside(key.removeprefix(PREFIX))
            found = known.fullmatch(name)
            made = self._factor(key, *found.groups()) if found else self._whole(key, name)
            for entry, piece in made:
                self._check(key, entry, piece)
                origin = entry.parameter or entry.tensor
                origin = around + origin.removeprefix("model.") if around else origin
                self.entries[entry.name] = replace(entry, origin=origin)
                self._pieces[entry.name] = piece
        self.tensors = {name: each.info for name, each in self.entries.items()}

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return str(self.adapter.file.path if name else self.adapter.opened.path)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        key, view, _ = self._pieces[name]
        return ANYWHERE if view else self.adapter.file.cuts(key)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``.

        Raises:
            InputError: it holds NaN or infinity.
        """
        key, view, inside = self._pieces[name]
        found = self.adapter.file.read(key, *(() if view else where))
        if not found.isfinite().all():
            raise InputError(f"{key} in {self.where(name)} holds NaN or infinity; train it again")
        return cut(found.view(view)[inside], where) if view else found

    def is_tied(self, parameter: str) -> bool:
        """Whether a parameter has its tensor from another one."""
        return self._modules.stored.get(parameter, parameter) != parameter

    def _inside(self, name: str) -> tuple[str, str]:
        """What a multimodal class has before a name; and the name in the language model."""
        found = WHOLE_MODEL.match(name)
        if not found or any(each.startswith(found[0]) for each in self._modules.stored):
            return "", name
        return found[0], f"model.{name[found.end() :]}"

    def _factor(
        self, key: str, module: str, inside: str, end: str
    ) -> Iterator[tuple[Entry, _Piece]]:
        """The entries of a tensor that goes with a weight of a module."""
        info, part = self.adapter.file.tensors[key], self.adapter.method.parts[end]
        self._check_ranks(key, f"{module}{inside}", part)
        targets, tail = self.adapter.config.get("target_parameters") or (), f"{inside}.{end}"
        parameter = self._modules.of_module(module, targets, inside.count(INSIDE))
        made = self._modules.conversion(parameter)
        if made is None and parameter not in self._modules.tensors:
            raise self._no_part(key, f"adapts {parameter}")
        places = self._modules.places(parameter) if made else LINEAR
        pairs = zip(part.sides, info.shape, strict=True)
        one = part.sides == (OUT, IN)  # of which the other dimension is 1
        sides = [None if one and size == 1 else places.get(side) for side, size in pairs]
        if made and (grid := experts_of(made)):
            rows = sum(self._modules.tensors[names[0]].shape[0] for names in grid)
            if part.sides[0] == OUT and info.shape[0] != rows:
                raise self._misfit(key, parameter, made.shapes[parameter])
            for tensor, shape, piece in _taken_apart(key, part, info.shape, grid, self._modules):
                seen = TensorInfo(shape, info.dtype)
                yield Entry(tensor, parameter, tail, seen, part, tuple(sides)), piece
            return
        if made and made.transform is not None:
            raise InputError(
                f"{key} in {self.adapter.file.path} adapts {parameter}, which transformers makes "
                f"of several tensors; {MERGE}"
            )
        tensor, tied = parameter, False  # of an expert, which PEFT puts into that of all
        if made:
            (tensor,), tied = made.sources, self.is_tied(parameter)
        weight, piece = self._modules.tensors[tensor].shape, _Piece(key)
        if len(weight) > 2 and len(sides) > 1:
            behind = [None if side is None else side + 1 for side in sides]
            sides = [0, *behind] if part.sides[0] == RANK else [*behind, 0]
            view = _of_experts(part, info.shape, weight[0])
            info, piece = TensorInfo(view, info.dtype), _Piece(key, view)
        name = parameter if made else ""
        yield Entry(tensor, name, tail, info, part, tuple(sides), tied), piece

    def _whole(self, key: str, name: str) -> Iterator[tuple[Entry, _Piece]]:
        """The entry of a tensor that takes the place of one of the model."""
        parameter = name.replace(INSIDE, "")
        made = self._modules.conversion(parameter)
        if made is None or made.transform is not None:
            raise self._no_part(key, f"takes the place of {parameter}")
        tail, info = name[len(parameter.rpartition(".")[0]) :], self.adapter.file.tensors[key]
        (tensor,), tied = made.sources, self.is_tied(parameter)
        yield Entry(tensor, parameter, tail, info, tied=tied), _Piece(key)

    def _no_part(self, key: str, does: str) -> InputError:
        return InputError(
            f"{key} in {self.adapter.file.path} {does}, which a "
            f"{type(self._modules.model).__name__} does not have; give the adapter of this model"
        )

    def _check_ranks(self, key: str, wrapped: str, part: Part) -> None:
        """Both factors of a product have one rank."""
        shape = self.adapter.file.tensors[key].shape
        fits = len(shape) == len(part.sides)
        if fits and RANK in part.sides and COLUMNS not in part.sides:
            rank = shape[part.sides.index(RANK)]
            fits = 0 < rank == self._ranks.setdefault(wrapped, rank)
        if not fits:
            raise InputError(
                f"{key} in {self.adapter.file.path} has shape {list(shape)}, which does not fit "
                "what else the adapter has for the module; save it again"
            )

    def _check(self, key: str, entry: Entry, piece: _Piece) -> None:
        """A tensor has the sizes of that which it goes with."""
        shape, info = self._modules.tensors[entry.tensor].shape, self.adapter.file.tensors[key]
        order = range(len(shape)) if entry.dimensions is None else entry.dimensions
        own, sizes = entry.info.shape, dict(enumerate(shape))
        pairs = zip(order, own, strict=False)
        expected = tuple(size if side is None else sizes.get(side) for side, size in pairs)
        elements = prod(piece.view or info.shape)
        if info.dtype not in FLOAT_BYTES:
            raise InputError(
                f"{key} in {self.adapter.file.path} has dtype {info.dtype}; save it in one of "
                f"{', '.join(FLOAT_BYTES)}"
            )
        if len(order) != len(own) or expected != own or elements != info.elements:
            raise self._misfit(key, entry.tensor, shape)

    def _misfit(self, key: str, name: str, shape: tuple[int, ...]) -> InputError:
        own = self.adapter.file.tensors[key].shape
        return InputError(
            f"{key} in {self.adapter.file.path} has shape {list(own)}, which does not fit {name} "
            f"of the model, {list(shape)}; give the adapter of this model"
        )


def _of_experts(part: Part, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of a factor with a dimension for experts, as PEFT orders them.

    The rows of A are those of the first expert, then the next; columns of B are those of the first
    rank of every expert, then the next (``peft.tuners.lora.ParamWrapper``).
    """
    rows, columns = shape
    if part.sides[0] == RANK:
        return count, rows // count, columns
    return rows, columns // count, count


def _taken_apart(
    key: str, part: Part, shape: tuple[int, ...], grid: list[list[str]], modules: Modules
) -> Iterator[tuple[str, tuple[int, ...], _Piece]]:
    """The factors of all experts: the tensor of each, its shape, and where it is."""
    view, begin = _of_experts(part, shape, len(grid[0])), 0
    for names in grid:
        end = begin + modules.tensors[names[0]].shape[0]
        for number, tensor in enumerate(names):
            if part.sides[0] == RANK:  # which all matrices share
                yield tensor, view[1:], _Piece(key, view, (number,))
            else:
                where = (slice(begin, end), slice(None), number)
                yield tensor, (end - begin, view[1]), _Piece(key, view, where)
        begin = end
