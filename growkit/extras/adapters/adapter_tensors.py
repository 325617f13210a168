"""The tensors of an adapter, each with the tensor in the model's files with which it grows.

One parameter of the class may combine several tensors of the files: experts. Its factors are split
into those of each tensor, and combined again in the grown adapter (``Assembly``), as moments of
optimizers are (``growkit.extras.optimizer.grow_state``).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.tensors import ANYWHERE, FLOAT_BYTES, TensorInfo, Weights, cut, widened
from growkit.extras.adapters.adapter_folder import (
    COLUMNS,
    IN,
    MERGE,
    OUT,
    RANK,
    AdapterFolder,
    TensorKind,
)
from growkit.extras.adapters.modules import Adapted, Modules, experts_of
from growkit.extras.composed_transforms import Computed
from growkit.model.model import Model
from growkit.planning.plan import Plan, Planned, Rule
from growkit.planning.transforms import Kept

PREFIX, INSIDE = "base_model.model.", ".base_layer"
"""PEFT's prefix of a module's name, and the suffix that each wrapper around the module adds."""

WRAPPED = re.compile(rf"(\.token_adapter)?{re.escape(INSIDE)}")
"""The suffixes of a module whose own parameter is in the adapter."""

COPIES = re.compile(r"\.(original_module|modules_to_save)\.(?=\w+$)")
"""Parts of names under which PEFT saves a resized embedding again."""

WHOLE_MODEL = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
"""Prefix of the language model inside a multimodal model; only the language model is grown."""

LINEAR = {OUT: 0, IN: 1, COLUMNS: 1}
"""The dimension of each meaning in the weight of a linear layer."""

WHOLE = TensorKind((), scaled=True)
"""A tensor that replaces a tensor of the model."""


@dataclass(frozen=True)
class Entry:
    """A tensor of an adapter, or the part of it that belongs to one tensor in the model's files.

    Attributes:
        tensor: name of the tensor in the model's files.
        parameter: the adapted parameter; empty if the adapter uses the names in the files.
        tail: its name in the adapter, after the name of the module.
        info: its header.
        kind: its kind.
        dimensions: for each of its dimensions, the dimension of the weight that it follows, or None
            if it does not grow; None as a whole if the tensor replaces the weight.
        tied: whether the parameter is tied to another one, which is in the files.
        origin: the parameter or tensor of the source that it adapts.
    """

    tensor: str
    parameter: str
    tail: str
    info: TensorInfo
    kind: TensorKind = WHOLE
    dimensions: tuple[int | None, ...] | None = None
    tied: bool = False
    origin: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """A unique name."""
        return f"{self.tensor}{f':{self.parameter}' * self.tied}{self.tail}"

    @property
    def key(self) -> str:
        """The name of its tensor in the adapter."""
        module = (self.parameter or self.tensor).rpartition(".")[0]
        return f"{PREFIX}{module}{self.tail}"


class _Piece(NamedTuple):
    """The location of an entry in the adapter's file.

    Attributes:
        key: name of the tensor in the file.
        view: shape in which the tensor is viewed; None for its own.
        where: the part of the view.
    """

    key: str
    view: tuple[int, ...] | None = None
    where: tuple[slice | int, ...] = (slice(None),)


class AdapterTensors(Model):
    """The tensors of an adapter, each with its tensor in the model's files.

    Args:
        adapter: the adapter.
        modules: the modules of its model.

    Attributes:
        entries: all entries, by name.

    Raises:
        InputError: a tensor belongs to no parameter of the model, or does not fit it.
    """

    def __init__(self, adapter: AdapterFolder, modules: Modules) -> None:
        self.adapter, self._modules, self.config = adapter, modules, dict[str, object]()
        self.entries: dict[str, Entry] = {}
        self._pieces: dict[str, _Piece] = {}
        self._ranks: dict[str, int] = {}
        self._factors: Counter[str] = Counter()  # by module, number of A minus number of B
        ends = "|".join(map(re.escape, adapter.method.kinds))
        known = re.compile(rf"(.*?)((?:{re.escape(INSIDE)})*)\.({ends})")
        for key in adapter.file.tensors:
            copied = COPIES.sub(".", key)
            if copied != key and copied in adapter.file.tensors:
                continue  # PEFT reads only the plain name
            prefix, name = self._without_prefix(key.removeprefix(PREFIX))
            match = known.fullmatch(name)
            pairs = self._factor(key, *match.groups()) if match else self._whole(key, name)
            for entry, piece in pairs:
                self._check(key, entry, piece)
                origin = entry.parameter or entry.tensor
                origin = prefix + origin.removeprefix("model.") if prefix else origin
                self.entries[entry.name] = replace(entry, origin=origin)
                self._pieces[entry.name] = piece
        if lonely := next((name for name, count in self._factors.items() if count), None):
            raise InputError(
                f"{adapter.file.path} has one factor of {lonely} without the other; save it again"
            )
        self.tensors = {name: entry.info for name, entry in self.entries.items()}

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
            InputError: the tensor holds NaN or infinity.
        """
        key, view, inside = self._pieces[name]
        tensor = self.adapter.file.read(key, *(() if view else where))
        if not widened(tensor).isfinite().all():
            raise InputError(f"{key} in {self.where(name)} holds NaN or infinity; train it again")
        return cut(tensor.view(view)[inside], where) if view else tensor

    def is_tied(self, parameter: str) -> bool:
        """Whether a parameter is tied to another one, which is in the files."""
        return self._modules.stored.get(parameter, parameter) != parameter

    def _without_prefix(self, name: str) -> tuple[str, str]:
        """Split a name into the prefix of a multimodal class and the name in the language model."""
        match = WHOLE_MODEL.match(name)
        if not match or any(stored.startswith(match[0]) for stored in self._modules.stored):
            return "", name
        return match[0], f"model.{name[match.end() :]}"

    def _factor(
        self, key: str, module: str, inside: str, end: str
    ) -> Iterator[tuple[Entry, _Piece]]:
        """Make the entries of a tensor that belongs to a weight."""
        info, kind = self.adapter.file.tensors[key], self.adapter.method.kinds[end]
        self._check_ranks(key, f"{module}{inside}", kind)
        targets, tail = self.adapter.config.get("target_parameters") or (), f"{inside}.{end}"
        parameter = self._modules.of_module(module, targets, inside.count(INSIDE))
        conversion = self._modules.conversion(parameter)
        if conversion is None and parameter not in self._modules.tensors:
            raise self._unknown(key, f"adapts {parameter}")
        places = self._modules.places(parameter) if conversion else LINEAR
        if (
            conversion
            and places[IN]
            and len(conversion.shapes[self._modules.stored[parameter]]) > 2
        ):
            self._check_order(key)
        pairs = zip(kind.sides, info.shape, strict=True)
        one = kind.sides == (OUT, IN)  # the other dimension is 1
        sides = [None if one and size == 1 else places.get(side) for side, size in pairs]
        if conversion and (grid := experts_of(conversion)):
            rows = sum(self._modules.tensors[names[0]].shape[0] for names in grid)
            if kind.sides[0] == OUT and info.shape[0] != rows:
                raise self._misfit(key, parameter, conversion.shapes[parameter])
            for tensor, shape, piece in _split_experts(key, kind, info.shape, grid, self._modules):
                seen = TensorInfo(shape, info.dtype)
                yield Entry(tensor, parameter, tail, seen, kind, tuple(sides)), piece
            return
        if conversion and conversion.transform is not None:
            raise self._combined(key, f"adapts {parameter}")
        tensor, tied = parameter, False  # an expert's; PEFT combines those of all experts
        if conversion:
            (tensor,), tied = conversion.sources, self.is_tied(parameter)
        weight, piece = self._modules.tensors[tensor].shape, _Piece(key)
        if len(weight) > 2 and len(sides) > 1:
            inner = [None if side is None else side + 1 for side in sides]
            sides = [0, *inner] if kind.sides[0] == RANK else [*inner, 0]
            view = _of_experts(kind, info.shape, weight[0])
            info, piece = TensorInfo(view, info.dtype), _Piece(key, view)
        name = parameter if conversion else ""
        yield Entry(tensor, name, tail, info, kind, tuple(sides), tied), piece

    def _check_order(self, key: str) -> None:
        """Check that a factor of experts has inputs and outputs where later versions have them."""
        version = str(self.adapter.config.get("peft_version") or "0.17 or earlier")
        if re.match(r"0\.(\d|1[0-8])\b", version):
            raise InputError(
                f"{key} in {self.adapter.file.path} was saved by PEFT {version}, which exchanges "
                "inputs and outputs of target_parameters, unlike PEFT 0.19 and later; with that "
                "version, merge it into SRC (merge_and_unload), and grow that"
            )

    def _whole(self, key: str, name: str) -> Iterator[tuple[Entry, _Piece]]:
        """Make the entry of a tensor that replaces one of the model."""
        parameter = WRAPPED.sub("", name)
        conversion = self._modules.conversion(parameter)
        if conversion is None:
            raise self._unknown(key, f"replaces {parameter}")
        if conversion.transform is not None:
            raise self._combined(key, f"replaces {parameter}")
        tail, info = name[len(parameter.rpartition(".")[0]) :], self.adapter.file.tensors[key]
        (tensor,), tied = conversion.sources, self.is_tied(parameter)
        yield Entry(tensor, parameter, tail, info, tied=tied), _Piece(key)

    def _unknown(self, key: str, does: str) -> InputError:
        return InputError(
            f"{key} in {self.adapter.file.path} {does}, which a "
            f"{type(self._modules.model).__name__} does not have; give the adapter of this model"
        )

    def _combined(self, key: str, does: str) -> InputError:
        return InputError(
            f"{key} in {self.adapter.file.path} {does}, which transformers combines from several "
            f"tensors; {MERGE}"
        )

    def _check_ranks(self, key: str, wrapped: str, kind: TensorKind) -> None:
        """Check that both factors of a product have the same rank."""
        shape = self.adapter.file.tensors[key].shape
        fits = len(shape) == len(kind.sides)
        if fits and RANK in kind.sides and COLUMNS not in kind.sides:
            rank = shape[kind.sides.index(RANK)]
            fits = 0 < rank == self._ranks.setdefault(wrapped, rank)
            self._factors[wrapped] += 1 if kind.sides[0] == RANK else -1
        if not fits:
            raise InputError(
                f"{key} in {self.adapter.file.path} has shape {list(shape)}, which does not fit "
                "the other tensors of its module; save it again"
            )

    def _check(self, key: str, entry: Entry, piece: _Piece) -> None:
        """Check that a tensor has the sizes of the tensor with which it grows."""
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


def _of_experts(kind: TensorKind, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of a factor with its own dimension for experts.

    PEFT orders the rows of A by expert and then rank, but the columns of B by rank and then expert
    (``peft.tuners.lora.ParamWrapper``).
    """
    rows, columns = shape
    if kind.sides[0] == RANK:
        return count, rows // count, columns
    return rows, columns // count, count


def _split_experts(
    key: str, kind: TensorKind, shape: tuple[int, ...], grid: list[list[str]], modules: Modules
) -> Iterator[tuple[str, tuple[int, ...], _Piece]]:
    """Split a factor by experts: the tensor of each, its shape, and its location."""
    view, start = _of_experts(kind, shape, len(grid[0])), 0
    for names in grid:
        end = start + modules.tensors[names[0]].shape[0]
        for number, tensor in enumerate(names):
            if kind.sides[0] == RANK:  # all matrices share A
                yield tensor, view[1:], _Piece(key, view, (number,))
            else:
                where = (slice(start, end), slice(None), number)
                yield tensor, (end - start, view[1]), _Piece(key, view, where)
        start = end


class Assembly(Planned):
    """The tensors of a grown adapter with PEFT's names; factors of experts are combined.

    Args:
        stage: the grown tensors, by entry.
        entries: the entries, by name.
        modules: the modules of the grown model.
        path: path of the source's adapter, for messages.

    Attributes:
        parts: for each tensor, the names of its entries.
        adapted: the adapted parameters, by name; or tensors, if an adapter uses names in files.

    Raises:
        InputError: an adapted parameter has another form in the class of the grown model.
    """

    def __init__(
        self, stage: Weights, entries: Mapping[str, Entry], modules: Modules, path: Path
    ) -> None:
        self.parts: dict[str, list[str]] = {}
        self.adapted: dict[str, Adapted] = {}
        by_key: dict[str, Entry] = {}
        for name, entry in entries.items():
            parameter = entry.parameter
            if parameter and not entry.tied:
                parameter = modules.by_tensor.get(entry.tensor, "")
            if parameter.rpartition(".")[2] != entry.parameter.rpartition(".")[2]:
                raise InputError(
                    f"the adapter in {path} adapts {entry.origin}, which is in "
                    f"{parameter or 'no parameter'} of the grown model; {MERGE}"
                )
            placed = replace(entry, parameter=parameter)
            self.parts.setdefault(placed.key, []).append(name)
            by_key[placed.key] = placed
            if entry.kind.sides[-1:] == (IN,):
                rank = entry.info.shape[-2] if RANK in entry.kind.sides else None
                self.adapted[parameter or entry.tensor] = Adapted(entry.origin, rank)
        rules = [self._rule(key, entry, stage, modules) for key, entry in by_key.items()]
        super().__init__(stage, Plan({}, tuple(rules)))

    def _rule(self, key: str, entry: Entry, stage: Weights, modules: Modules) -> Rule:
        """How a tensor is made from its entries; in the file, experts have no own dimension."""
        names, shape, matrices = self.parts[key], entry.info.shape, 1
        conversion = modules.conversion(entry.parameter)
        grid = conversion and experts_of(conversion)
        by_expert = entry.kind.sides[:1] == (RANK,)
        if not grid and len(entry.dimensions or ()) < 3:
            return Rule(key, entry.info, Kept(names[0]))
        if grid:
            grid = [[f"{name}{entry.tail}" for name in of] for of in grid]
            assert {*names} == {name for of in grid for name in of}
            rows, count = sum(stage.tensors[of[0]].shape[0] for of in grid), len(grid[0])
            shape = (count, *shape) if by_expert else (rows, *shape[1:], count)
            grid = grid[:1] if by_expert else grid  # all matrices share A
            names, matrices = [name for of in zip(*grid, strict=True) for name in of], len(grid)
        one, two, three = shape
        shape = (one * two, three) if by_expert else (one, two * three)
        compute = partial(_combined, matrices, 0 if by_expert else -1, shape)
        computed = Computed(tuple(names), "factors of experts", compute)
        return Rule(key, TensorInfo(shape, entry.info.dtype), computed)


def _combined(matrices: int, along: int, shape: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Stack the factors of experts, each of which has parts for several matrices."""
    starts = range(0, len(parts), matrices)
    return torch.stack([torch.cat(parts[at : at + matrices]) for at in starts], along).view(shape)
