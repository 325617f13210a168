"""The tensors of an adapter, and the tensors in a model's files with which each grows.

An adapter names modules of the model's class. The class may have in one parameter what files hold
in several tensors: experts. Its factors are taken apart into those of each tensor, and put together
again for the class, as moments of optimizers are (``growkit.optimizer.growing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from growkit.adapters.methods import COLUMNS, IN, MERGE, OUT, RANK, Part, method_of
from growkit.base.errors import InputError
from growkit.base.tensors import ANYWHERE, Config, TensorInfo, Weights, cut
from growkit.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, Folder
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.weight_file import open_weights
from growkit.engine.class_weights import empty_model, stacks
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class
from growkit.planning.transforms import Beside

PREFIX, INSIDE = "base_model.model.", ".base_layer"
"""What PEFT puts before the name of a module, and behind it for each wrap around the module."""

WHOLE = Part((), scaled=True)
"""A tensor that takes the place of the model's."""


class AdapterFolder:
    """An adapter as PEFT saves it.

    Attributes:
        opened: the folder.
        file: the file with its tensors.
        config: the contents of ``adapter_config.json``.
        method: see ``METHODS``.

    Raises:
        InputError: there is none, it is damaged, or of a method that does not grow.
    """

    def __init__(self, path: Path) -> None:
        self.opened = Folder(path)
        if not self.opened.has(ADAPTER):
            raise InputError(f"{path} has no {ADAPTER}; give the folder of an adapter of PEFT")
        self.config: Config = self.opened.json(ADAPTER)
        self.method = method_of(self.config, str(path / ADAPTER))
        name = next((each for each in ADAPTER_WEIGHTS if self.opened.find(each)), None)
        if name is None:
            raise InputError(f"{path} has no {ADAPTER_WEIGHTS[0]}; copy the adapter again")
        self.file = open_weights(self.opened, name)

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        return [self.opened.path / ADAPTER, *self.file.paths]


class Modules:
    """The parameters of a model's class, and the tensors in files that they are made of.

    Args:
        checkpoint: of the model; headers are enough.

    Attributes:
        tensors: the headers of the files.
        model: the class's model, without weights.
        stored: for each parameter the one whose tensor is in the files: another one, if it is tied.
        conversions: how transformers makes each of tensors.

    Raises:
        InputError: transformers has no class for it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if lacks_class(checkpoint.config):
            raise InputError(
                f"transformers has no class for the {checkpoint.config['model_type']} model in "
                f"{checkpoint.folder}, so that PEFT adapts none; leave out --adapter"
            )
        self.tensors = checkpoint.tensors
        self.conversions = {
            n: each for each in loading(checkpoint).conversions for n in each.shapes
        }
        self.model, _, stored = empty_model(checkpoint, torch.float32, "eager")
        self.stored = {n: stored(n) for n, _ in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def by_tensor(self) -> Mapping[str, str]:
        """The parameter that every tensor is, or is a part of."""
        made = self.conversions.items()
        return {tensor: name for name, each in made for tensor in each.sources}

    def conversion(self, parameter: str) -> Conversion | None:
        """How a parameter is made; None if there is no such parameter."""
        return self.conversions.get(self.stored.get(parameter, ""))

    def of_module(self, module: str, targets: Sequence[str], depth: int) -> str:
        """The parameter of a module that is adapted.

        Args:
            module: its name.
            targets: ``target_parameters``, each the end of a parameter's name. PEFT wraps a module
                once for each of its own, in the order of the class.
            depth: how many of the wraps are around the one that is meant.
        """
        own = (name for name in self.stored if name.rpartition(".")[0] == module)
        found = [name for name in own if any(f".{name}".endswith(f".{each}") for each in targets)]
        return found[-1 - depth] if depth < len(found) else f"{module}.weight"

    def places(self, parameter: str, dimensions: int) -> dict[str, int]:
        """Which dimensions of a parameter its module reads and writes: the last two, in some order.

        Args:
            parameter: its name.
            dimensions: how many it has.
        """
        module = self.model.get_submodule(parameter.rpartition(".")[0])
        turned = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        turned |= bool(getattr(module, "is_transposed", False))
        rows, columns = dimensions - 2, dimensions - 1
        reads, writes = (rows, columns) if turned else (columns, rows)
        return {IN: reads, OUT: writes, COLUMNS: columns}


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
    def module(self) -> str:
        """The name of its module."""
        return (self.parameter or self.tensor).rpartition(".")[0]

    @property
    def key(self) -> str:
        """The name of its tensor in the adapter."""
        return f"{PREFIX}{self.module}{self.tail}"

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
        ends = "|".join(map(re.escape, adapter.method.parts))
        known = re.compile(rf"(.*?)((?:{re.escape(INSIDE)})*)\.({ends})")
        for key in adapter.file.tensors:
            found = known.fullmatch(key.removeprefix(PREFIX))
            for entry, piece in self._factor(key, *found.groups()) if found else self._whole(key):
                self._check(key, entry, piece)
                known_as = replace(entry, origin=entry.parameter or entry.tensor)
                self.entries[entry.name], self._pieces[entry.name] = known_as, piece
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

    def is_tied(self, tensor: str) -> bool:
        """Whether a tensor would be of a parameter that has its tensor from another one."""
        return self._modules.stored.get(tensor, tensor) != tensor

    def _factor(
        self, key: str, module: str, inside: str, end: str
    ) -> Iterator[tuple[Entry, _Piece]]:
        """The entries of a tensor that goes with a weight of a module."""
        info, part = self.adapter.file.tensors[key], self.adapter.method.parts[end]
        targets, tail = self.adapter.config.get("target_parameters") or (), f"{inside}.{end}"
        parameter = self._modules.of_module(module, targets, inside.count(INSIDE))
        made = self._modules.conversion(parameter)
        if made is None and parameter in self._modules.tensors:  # expert by expert
            places = {OUT: 0, IN: 1}
            dimensions = tuple(places.get(side) for side in part.sides)
            yield Entry(parameter, "", tail, info, part, dimensions), _Piece(key)
            return
        grid = made and experts_of(made)
        if made is None or (made.transform is not None and grid is None):
            raise InputError(
                f"{key} in {self.adapter.file.path} adapts {parameter}, "
                + (
                    f"which transformers makes of several tensors; {MERGE}"
                    if made
                    else f"which a {type(self._modules.model).__name__} does not have; give the "
                    "adapter of this model"
                )
            )
        first = len(made.shapes[self._modules.stored[parameter]]) - 2
        places = self._modules.places(parameter, first + 2)
        pairs = zip(part.sides, info.shape, strict=False)  # a wrong shape is refused below
        sides = [None if size == 1 else places.get(side) for side, size in pairs]
        if grid:
            dimensions = tuple(None if side is None else side - 1 for side in sides)
            for tensor, shape, piece in _taken_apart(key, part, info.shape, grid, self._modules):
                seen = TensorInfo(shape, info.dtype)
                yield Entry(tensor, parameter, tail, seen, part, dimensions), piece
            return
        (tensor,), tied = made.sources, self._modules.stored[parameter] != parameter
        piece = _Piece(key)
        if first > 0:  # experts in one tensor
            sides = [0, *sides] if part.sides[0] == RANK else [*sides, 0]
            view = _of_experts(part, info.shape, self._modules.tensors[tensor].shape[0])
            info, piece = TensorInfo(view, info.dtype), _Piece(key, view)
        yield Entry(tensor, parameter, tail, info, part, tuple(sides), tied), piece

    def _whole(self, key: str) -> Iterator[tuple[Entry, _Piece]]:
        """The entry of a tensor that takes the place of one of the model."""
        name = key.removeprefix(PREFIX)
        parameter = name.replace(INSIDE, "")
        made = self._modules.conversion(parameter)
        if made is None or made.transform is not None:
            raise InputError(
                f"{key} in {self.adapter.file.path} takes the place of no parameter that a "
                f"{type(self._modules.model).__name__} has in its files; give the adapter of this "
                "model"
            )
        tail = name[len(parameter.rpartition(".")[0]) :]
        (tensor,), tied = made.sources, self._modules.stored[parameter] != parameter
        yield Entry(tensor, parameter, tail, self.adapter.file.tensors[key], tied=tied), _Piece(key)

    def _check(self, key: str, entry: Entry, piece: _Piece) -> None:
        """A tensor has the sizes of that which it goes with."""
        shape, info = self._modules.tensors[entry.tensor].shape, self.adapter.file.tensors[key]
        order = range(len(shape)) if entry.dimensions is None else entry.dimensions
        sizes = [None if side is None else shape[side] for side in order]
        own = entry.info.shape
        fits = len(sizes) == len(own) and prod(piece.view or info.shape) == info.elements
        if not fits or any(n not in (None, size) for n, size in zip(sizes, own, strict=True)):
            raise InputError(
                f"{key} in {self.adapter.file.path} has shape {list(info.shape)}, which does not "
                f"fit {entry.tensor} of the model, {list(shape)}; give the adapter of this model"
            )


def experts_of(made: Conversion) -> list[list[str]] | None:
    """The tensors of all experts that a parameter is made of: those of one matrix, then the next.

    None if transformers does not stack them, matrix below matrix.
    """
    if made.transform is None or not stacks(made):
        return None
    if any(each.dim != 1 for each in made.transform.operations[1:]):
        return None
    return [made.tensors[each] for each in made.transform.source_patterns if each in made.tensors]


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
