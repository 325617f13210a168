"""A folder of torch.distributed.checkpoint, with an entry for every parameter, by its name.

``optimizer.state.NAME.exp_avg`` and ``optimizer.param_groups.NAME.lr`` are what transformers,
torchtitan and everything else writes that asks torch to flatten an optimizer's state. Such folders
are read and written as those of weights are (``growkit.checkpoint.distributed_file``).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.checkpoint.distributed_file import (
    REMEDY,
    DistributedFile,
    Listed,
    distributed_shards,
    read_list,
    refusing,
    write_list,
)
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.model_files import LIST
from growkit.checkpoint.writing import Hashes, write_shards
from growkit.optimizer.groups import ParamGroup
from growkit.optimizer.growing import GrownState
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.schedule import OF_GROUPS, grown_schedule, holds_schedule
from growkit.optimizer.state import CARRIED, NO_MOMENTS, SCALED, STEP, State, as_float

FOLDER = "optimizer"
"""What it is called in the folder of a model."""

WEIGHTS = "weights"
"""What tensors are called that are not the optimizer's."""

ENTRY = re.compile(r"(?P<before>(?:\w+\.)?)(?P<part>state|param_groups)\.(?P<of>.+)\.(?P<key>\w+)")
"""What an entry of an optimizer is called."""

SHARD_BYTES = 5 * 10**9
"""Size of a written file, at most; a larger tensor has one by itself."""

MOST_VALUE = 1 << 20
"""Bytes of an entry that is no tensor."""


@dataclass(frozen=True)
class _Rest:
    """What reading passes to writing.

    Attributes:
        before: what the names of entries begin with.
        carried: values of entries that are neither the optimizer's nor a schedule's.
    """

    before: str
    carried: Mapping[str, Any]


class _Distributed:
    name = "torch.distributed.checkpoint"
    outputs: tuple[str, ...] = (FOLDER,)

    def holds(self, path: Path) -> bool:
        """See ``Format``."""
        return (path / LIST).is_file()

    def open(self, path: Path, parameters: Parameters) -> State:
        """See ``Format``."""
        entries = _Entries(path)
        options: dict[str, dict[str, Any]] = {}
        steps: dict[str, float] = {}
        tensors: dict[str, Listed] = {}
        befores, others = set(), []
        for entry, of in entries.listed.items():
            found = ENTRY.fullmatch(entry)
            if not found:
                others.append(entry)
                continue
            befores.add(found["before"])
            name, key = found["of"], found["key"]
            if found["part"] == "param_groups":
                options.setdefault(name, {})[key] = entries.option(entry)
            elif key == STEP:
                steps[name] = entries.number(entry)
            elif of.shape is not None:
                tensors[f"{name}.{key}"] = of
        if len(befores) == 1 and not tensors:
            raise InputError(f"{path} {NO_MOMENTS}")
        if len(befores) != 1:
            raise InputError(
                f"{path} has no entries of one optimizer like optimizer.state.NAME.exp_avg; save "
                "its state flat (StateDictOptions(flatten_optimizer_state_dict=True))"
            )
        groups = _groups(options, parameters)
        numbers = DistributedFile(entries.folder, tensors)
        carried, beside = entries.carried(others, parameters)
        schedules = _schedules(path, carried, groups)
        for parent, kept in schedules.items():
            beside[f"{parent}{min(kept)}".partition(".")[0]] = SCALED
            carried = {k: v for k, v in carried.items() if _parent(k) != parent}
        rest = _Rest(befores.pop(), carried)
        of_path = {str(path): schedules} if schedules else {}
        return State(self, path, entries.files, groups, steps, numbers, rest, beside, of_path)

    def write(
        self,
        state: State,
        grown: GrownState,
        folder: Path,
        advance: Callable[[int], None],
        hashes: Hashes,
    ) -> None:
        """See ``Format``."""
        rest: _Rest = state.rest
        made = folder / FOLDER
        made.mkdir()
        shards = distributed_shards(grown.tensors, SHARD_BYTES)
        write_shards(grown, made, shards, advance, hashes)
        names = {f"{rest.before}state.{key}": key for key in grown.tensors}
        values = dict(rest.carried)
        for group in grown.groups:
            for name in group.parameters:
                for key, value in group.options.items():
                    values[f"{rest.before}param_groups.{name}.{key}"] = value
        for where, schedules in state.schedules.items():
            for parent, kept in schedules.items():
                schedule = grown_schedule(kept, where, len(state.groups), grown.groups)
                values |= {f"{parent}{key}": value for key, value in schedule.items()}
        write_list(shards, made, names, values, rest.before.removesuffix("."))


FORMAT = _Distributed()


class _Entries:
    """The entries of a checkpoint.

    Attributes:
        folder: that has it.
        listed: all entries, by name.
        files: all files.
    """

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.listed = read_list(self.folder)
        names = {LIST} | {part.file for each in self.listed.values() for part in each.parts}
        self.files = tuple(path / name for name in sorted(names))

    def value(self, entry: str) -> Any:
        """A plain value or a small tensor."""
        of = self.listed[entry]
        if of.shape is not None:
            return DistributedFile(self.folder, {entry: of}).read(entry)
        with refusing(self.folder, entry):
            (place,) = of.parts
            if place.length > MOST_VALUE:
                raise ValueError(f"it has more than {MOST_VALUE:,} bytes")
            with self.folder.open(place.file) as stream:
                stream.seek(place.begin)
                return torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)

    def option(self, entry: str) -> Any:
        """An option of a group, which is compared with those of other groups."""
        if self.listed[entry].shape is not None:
            return self.number(entry)
        found = self.value(entry)
        if isinstance(found, Tensor):
            raise InputError(f"{entry} in {self.folder.path} is a tensor, no option; {REMEDY}")
        return found

    def number(self, entry: str) -> float:
        """A number, which may be saved as a tensor."""
        shape, where = self.listed[entry].shape, self.folder.path
        if shape is not None and prod(shape) != 1:
            raise InputError(f"{entry} in {where} has shape {list(shape)}; {REMEDY}")
        found = self.value(entry)
        if isinstance(found, Tensor) and found.numel() == 1:
            return float(found)
        if not isinstance(found, int | float):
            raise InputError(f"{entry} in {where} is no number; {REMEDY}")
        return as_float(found)

    def carried(
        self, names: list[str], parameters: Parameters
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Values of entries that are carried over, and what becomes of all entries."""
        values: dict[str, Any] = {}
        becomes: dict[str, str] = {}
        for entry in names:
            shape, first = self.listed[entry].shape, entry.partition(".")[0]
            known = entry in parameters.shapes or entry.removeprefix("model.") in parameters.shapes
            if known or (shape is not None and prod(shape) > 1):
                becomes.setdefault(WEIGHTS, "left: they are in the files of the model")
                continue
            try:
                values[entry] = self.value(entry)
                becomes.setdefault(first, CARRIED)
            except InputError:
                becomes[first] = "left: it holds more than plain values"
        return values, becomes


def _parent(entry: str) -> str:
    """What the name of an entry begins with, up to its last part."""
    before, dot, _ = entry.rpartition(".")
    return before + dot


def _schedules(
    path: Path, values: Mapping[str, Any], groups: list[ParamGroup]
) -> dict[str, dict[str, Any]]:
    """Entries that belong to schedules, by what their names begin with.

    Raises:
        InputError: groups have different rates, and it is not clear which is whose.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry, value in values.items():
        found.setdefault(_parent(entry), {})[entry.removeprefix(_parent(entry))] = value
    found = {parent: kept for parent, kept in found.items() if holds_schedule(kept)}
    for parent, kept in found.items():
        for key in OF_GROUPS & kept.keys():
            option = {"base_lrs": "initial_lr", "_last_lr": "lr"}.get(key, key)
            own, of_groups = kept[key], [each.options.get(option) for each in groups]
            if isinstance(own, list) and any(each != own[0] for each in own) and own != of_groups:
                raise InputError(
                    f"{parent}{key} in {path} differs between groups, whose order torch does not "
                    "keep; save the schedule elsewhere, with the names of the parameters"
                )
    return found


def _groups(options: Mapping[str, dict[str, Any]], parameters: Parameters) -> list[ParamGroup]:
    """Parameters with the same options are a group."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name in dict.fromkeys((*parameters.shapes, *options)):
        if name in options:
            alike = next((names for each, names in found if each == options[name]), None)
            if alike is None:
                found.append((options[name], [name]))
            else:
                alike.append(name)
    return [ParamGroup(tuple(names), each) for each, names in found]
