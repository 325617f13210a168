"""A folder of torch.distributed.checkpoint, with an entry for every parameter, by its name.

``optimizer.state.NAME.exp_avg`` and ``optimizer.param_groups.NAME.lr`` are what transformers,
torchtitan and everything else writes that asks torch to flatten an optimizer's state. Tensors may
lie in any number of parts. torch reads and writes them, but for the list of all entries, which is a
pickle (``growkit.checkpoint.distributed_list``).
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from growkit.checkpoint.distributed_list import LIST, REMEDY, read_list, refusing
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import STORED_NAMES, TensorInfo, cut
from growkit.errors import InputError
from growkit.optimizer.groups import Group
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.schedule import grown_schedule
from growkit.optimizer.state import CARRIED, SCALED, STEP, Grown, State

FOLDER = "optimizer"
"""What it is called in the folder of a model."""

WEIGHTS = "weights"
"""What tensors are called that are not the optimizer's."""

ENTRY = re.compile(r"(?P<before>(?:\w+\.)?)(?P<part>state|param_groups)\.(?P<of>.+)\.(?P<key>\w+)")
"""What an entry of an optimizer is called."""

MOST_VALUE = 1 << 20
"""Bytes of an entry that is no tensor."""

_NAMES = {torch_name: name for name, torch_name in STORED_NAMES.items()}


@dataclass(frozen=True)
class _Rest:
    """What is handed on to the writing.

    Attributes:
        before: what the names of entries begin with.
        others: values of entries that are not the optimizer's.
    """

    before: str
    others: Mapping[str, Any]


class _Distributed:
    name = "torch.distributed.checkpoint"
    outputs = (FOLDER,)

    def holds(self, path: Path) -> bool:
        """See ``Format``."""
        return (path / LIST).is_file()

    def open(self, path: Path, parameters: Parameters) -> State:
        """See ``Format``."""
        folder = Folder(path)
        listed = _listed(folder)
        files = {LIST} | {str(each.relative_path) for each in listed.storage_data.values()}
        options: dict[str, dict[str, Any]] = {}
        steps: dict[str, float] = {}
        tensors: dict[str, str] = {}
        befores, others = set(), []
        for entry, of in listed.state_dict_metadata.items():
            found = ENTRY.fullmatch(entry)
            if not found:
                others.append(entry)
                continue
            befores.add(found["before"])
            name, key = found["of"], found["key"]
            if found["part"] == "param_groups":
                options.setdefault(name, {})[key] = _plain(folder, listed, entry)
            elif key == STEP:
                steps[name] = _number(folder, listed, entry)
            elif isinstance(of, TensorStorageMetadata):
                tensors[f"{name}.{key}"] = entry
        if len(befores) != 1 or not tensors:
            raise InputError(
                f"{path} has no entries of one optimizer like optimizer.state.NAME.exp_avg; save "
                "its state flat (StateDictOptions(flatten_optimizer_state_dict=True))"
            )
        groups = _groups(options, parameters)
        numbers = _Numbers(folder, listed, tensors)
        paths = tuple(path / name for name in sorted(files))
        carried, beside = _others(folder, listed, others, parameters)
        rest = _Rest(befores.pop(), carried)
        return State(self, path, paths, groups, steps, numbers, rest, beside)

    def write(
        self, state: State, grown: Grown, folder: Path, advance: Callable[[int], None]
    ) -> None:
        """See ``Format``."""
        rest: _Rest = state.rest
        entries: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for key, info in grown.tensors.items():
            dtype = getattr(torch, STORED_NAMES[info.dtype])
            keys[f"{rest.before}state.{key}"] = key
            entries[f"state.{key}"] = torch.empty(info.shape, dtype=dtype, device="meta")
        for group in grown.groups:
            for name in group.parameters:
                for key, value in group.options.items():
                    entries[f"param_groups.{name}.{key}"] = value
        before = rest.before.removesuffix(".")
        content = {before: entries} if before else entries
        for entry, value in rest.others.items():
            key = entry.rpartition(".")[2]
            content[entry] = grown_schedule({key: value}, len(state.groups), grown.groups)[key]
        planner, writer = _Planner(grown, keys, advance), _Writer(folder / FOLDER, sync_files=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs in one process
            try:
                save(content, storage_writer=writer, planner=planner, no_dist=True)
            except CheckpointException as error:
                for failure, _ in error.failures.values():
                    raise failure from None


FORMAT = _Distributed()


class _Planner(DefaultSavePlanner):
    """Makes every tensor when it is written."""

    def __init__(
        self, grown: Grown, keys: Mapping[str, str], advance: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._grown, self._of, self._advance = grown, keys, advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of an entry."""
        key = self._of.get(index.fqn)
        if key is None:
            return super().lookup_object(index)
        info = self._grown.tensors[key]
        made = torch.empty(info.shape, dtype=getattr(torch, STORED_NAMES[info.dtype]))
        begin = 0
        for block in self._grown.blocks(key):
            rows = block.shape[0] if block.dim() else 0
            (made[begin : begin + rows] if made.dim() else made).copy_(block)
            begin += rows
            self._advance(block.nbytes)
        return made


class _Writer(FileSystemWriter):
    """Writes every large tensor into a file of its own, and nothing of where and when it wrote.

    torch keeps all tensors of a file until the file is complete.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write all entries; see ``StorageWriter``."""
        alone = [each for each in plan.items if _elements(each) > 1]
        small = [each for each in plan.items if _elements(each) <= 1]
        files: Queue[Any] = Queue()
        for number, items in enumerate([small, *([each] for each in alone)]):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)

    def storage_meta(self) -> StorageMeta:
        """Of the checkpoint."""
        return StorageMeta()


def _elements(item: WriteItem) -> int:
    return item.tensor_data.size.numel() if item.tensor_data else 0


class _Reader(FileSystemReader):
    """Reads the numbers of a checkpoint whose list is known."""

    def __init__(self, folder: Folder, listed: Metadata) -> None:
        super().__init__(folder.path)
        self.set_up_storage_reader(listed, is_coordinator=True)


@dataclass(frozen=True)
class _Numbers:
    """The tensors of a checkpoint; see ``growkit.optimizer.state.Numbers``."""

    folder: Folder
    listed: Metadata
    entries: Mapping[str, str]

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The header of each."""
        found = {}
        for name, entry in self.entries.items():
            of: Any = self.listed.state_dict_metadata[entry]
            dtype = str(of.properties.dtype).removeprefix("torch.")
            found[name] = TensorInfo(tuple(of.size), _NAMES.get(dtype, dtype))
        return found

    def by_rows(self, name: str) -> bool:
        """Parts are read as a whole."""
        return False

    def read(self, name: str, rows: slice | None, columns: slice | None = None) -> Tensor:
        """A tensor; see ``Numbers``."""
        with torch._C.DisableTorchFunction():
            return cut(_tensor(self.folder, self.listed, self.entries[name]), rows, columns)


def _tensor(folder: Folder, listed: Metadata, entry: str) -> Tensor:
    of: Any = listed.state_dict_metadata[entry]
    found = torch.empty(of.size, dtype=of.properties.dtype)
    with refusing(folder, entry):
        plan = create_default_local_load_plan({entry: found}, listed)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({entry: found}, listed, is_coordinator=True)
        _Reader(folder, listed).read_data(plan, planner).wait()
    return found


def _plain(folder: Folder, listed: Metadata, entry: str) -> Any:
    """The value of an entry that is no tensor, or a tensor of one number."""
    of = listed.state_dict_metadata[entry]
    if not isinstance(of, BytesStorageMetadata):
        return _number(folder, listed, entry)
    with refusing(folder, entry):
        place = listed.storage_data[MetadataIndex(entry)]
        if place.length > MOST_VALUE:
            raise ValueError(f"it has more than {MOST_VALUE:,} bytes")
        with folder.open(str(place.relative_path)) as stream:
            stream.seek(place.offset)
            return torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)


def _number(folder: Folder, listed: Metadata, entry: str) -> float:
    of = listed.state_dict_metadata[entry]
    if isinstance(of, TensorStorageMetadata) and of.size.numel() != 1:
        raise InputError(f"{entry} in {folder.path} has shape {list(of.size)}; {REMEDY}")
    tensor = isinstance(of, TensorStorageMetadata)
    found = _tensor(folder, listed, entry) if tensor else _plain(folder, listed, entry)
    if not isinstance(found, Tensor | int | float):
        raise InputError(f"{entry} in {folder.path} is no number; {REMEDY}")
    return float(found)


def _listed(folder: Folder) -> Metadata:
    """The list of entries, as torch has it."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in read_list(folder).items():
        for part in entry.parts:
            offsets = None if entry.shape is None else part.offsets
            place = _StorageInfo(part.file, part.begin, part.length)
            stored[MetadataIndex(name, offsets)] = place
        if entry.shape is None:
            entries[name] = BytesStorageMetadata()
            continue
        chunks = [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            for part in entry.parts
        ]
        properties = TensorProperties(getattr(torch, str(entry.dtype)))
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(entries, storage_data=stored)


def _others(
    folder: Folder, listed: Metadata, entries: list[str], parameters: Parameters
) -> tuple[dict[str, Any], dict[str, str]]:
    """What else a checkpoint holds: the values that are carried over, and what is said of all."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for entry in entries:
        of, first = listed.state_dict_metadata[entry], entry.partition(".")[0]
        plain = isinstance(of, BytesStorageMetadata)
        known = entry in parameters.shapes or entry.removeprefix("model.") in parameters.shapes
        if known or (isinstance(of, TensorStorageMetadata) and of.size.numel() > 1):
            said.setdefault(WEIGHTS, "left: they lie in the files of the model")
            continue
        try:
            values[entry] = (_plain if plain else _tensor)(folder, listed, entry)
            said[first] = SCALED if entry.endswith("base_lrs") else said.get(first, CARRIED)
        except InputError:
            said[first] = "left: it holds more than plain values"
    return values, said


def _groups(options: Mapping[str, dict[str, Any]], parameters: Parameters) -> list[Group]:
    """Parameters with the same options are a group."""
    order = [*parameters.shapes, *(name for name in options if name not in parameters.shapes)]
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name in order:
        if name in options:
            alike = next((names for each, names in found if each == options[name]), None)
            if alike is None:
                found.append((options[name], [name]))
            else:
                alike.append(name)
    return [Group(tuple(names), each) for each, names in found]
