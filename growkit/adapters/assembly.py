"""A grown adapter with PEFT's names and shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from growkit.adapters.folder import IN, MERGE, RANK
from growkit.adapters.modules import Adapted, Modules, experts_of
from growkit.adapters.tensors import Entry
from growkit.base.errors import InputError
from growkit.base.tensors import ANYWHERE, TensorInfo, Weights, cut


class Assembly(Weights):
    """The tensors of a grown adapter with PEFT's names; factors of experts are combined.

    Args:
        stage: the grown tensors, by entry.
        entries: the entries, by name.
        modules: the modules of the grown model.
        path: path of the source's adapter, for messages.

    Attributes:
        made: for each tensor, the names of its entries.
        adapted: the adapted parameters, by name; or tensors, if an adapter uses names in files.

    Raises:
        InputError: an adapted parameter has another form in the class of the grown model.
    """

    def __init__(
        self, stage: Weights, entries: Mapping[str, Entry], modules: Modules, path: Path
    ) -> None:
        self._stage, self.config = stage, {}
        self.made: dict[str, list[str]] = {}
        self.adapted: dict[str, Adapted] = {}
        self._placed: dict[str, Entry] = {}
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
            self.made.setdefault(placed.key, []).append(name)
            self._placed[placed.key] = placed
            if entry.kind.sides[-1:] == (IN,):
                rank = entry.info.shape[-2] if RANK in entry.kind.sides else None
                self.adapted[parameter or entry.tensor] = Adapted(entry.origin, rank)
        self._grids: dict[str, list[list[str]]] = {}
        for key, entry in self._placed.items():
            made = modules.conversion(entry.parameter)
            if grid := made and experts_of(made):
                self._grids[key] = [[f"{name}{entry.tail}" for name in names] for names in grid]
                assert {*self.made[key]} == {name for names in self._grids[key] for name in names}
        self.tensors = {
            key: TensorInfo(self._shape(key), entry.info.dtype)
            for key, entry in self._placed.items()
        }

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self._stage.where(self.made[name][0] if name else None)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return ANYWHERE if self._is_combined(name) else self._stage.cuts(self.made[name][0])

    def blocks(self, name: str) -> Iterator[Tensor]:
        """See ``Weights``."""
        if self._is_combined(name):
            yield self.read(name)
        else:
            yield from self._stage.blocks(self.made[name][0])

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        if not self._is_combined(name):
            return self._stage.read(self.made[name][0], *where)
        grid, read = self._grids.get(name), self._stage.read
        if grid is None:
            whole = read(self.made[name][0])
        elif self._by_expert(name):
            whole = torch.stack([read(each) for each in grid[0]])
        else:
            experts = zip(*grid, strict=True)
            whole = torch.stack([torch.cat([*map(read, names)]) for names in experts], -1)
        return cut(whole.reshape(self.tensors[name].shape), where)

    def _by_expert(self, key: str) -> bool:
        """Whether the rows of a factor are ordered by expert."""
        return self._placed[key].kind.sides[0] == RANK

    def _is_combined(self, key: str) -> bool:
        entry = self._placed[key]
        return key in self._grids or (entry.dimensions is not None and len(entry.dimensions) > 2)

    def _shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor in the file, where experts have no dimension of their own."""
        shape = self._placed[key].info.shape
        if not self._is_combined(key):
            return shape
        if grid := self._grids.get(key):
            rows = sum(self._stage.tensors[names[0]].shape[0] for names in grid)
            experts = len(grid[0])
            shape = (experts, *shape) if self._by_expert(key) else (rows, *shape[1:], experts)
        one, two, three = shape
        return (one * two, three) if self._by_expert(key) else (one, two * three)
