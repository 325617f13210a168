"""A folder of torch.distributed.checkpoint, with entries by the names of parameters.

torch writes an optimizer's state as entries such as ``optimizer.state.NAME.exp_avg``. Options are
entries of parameters if the state was flattened (``optimizer.param_groups.NAME.lr``, torchtitan),
and otherwise of numbered groups (``optimizer.param_groups.0.lr``, accelerate with FSDP2). Such
folders are read and written like those of weights (``growkit.extras.formats.distributed_file``).
"""

import io
import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.torch_internals import tree_map
from growkit.extras.formats import distributed_file
from growkit.extras.formats.distributed_file import LIST, REMEDY, DistributedFile, Listed
from growkit.extras.optimizer.param_groups import Parameters, ParamGroup
from growkit.extras.optimizer.schedule import LEFT, is_schedule, read_schedule
from growkit.extras.optimizer.state import (
    CARRIED,
    NO_MOMENTS,
    SCALED,
    STEP,
    State,
    StateFormat,
    TargetState,
)
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.writing import Save

FOLDER = "optimizer"
"""Name of the state in the folder of a model."""

ACCELERATE_STATE = re.compile(r"optimizer_[0-9]+")
"""Names of the state in a checkpoint of accelerate, which looks for them there."""

WEIGHTS = "weights"
"""Name for tensors that are not the optimizer's."""

ENTRY = re.compile(
    r"(?P<before>(?:\w+\.){0,2}?)(?P<part>state|param_groups)\.(?P<of>.+)\.(?P<key>\w+)"
)
"""Names of an optimizer's entries."""

PARAMS = "params"
"""Key for the names of the parameters of a numbered group."""

SHARD_BYTES = 5 * 10**9
"""Limit for a written file, in bytes; a larger tensor gets a file of its own."""

MAX_VALUE = 1 << 20
"""Limit for an entry that is not a tensor, in bytes."""


def _open(path: Path, parameters: Parameters) -> State:
    folder = Folder(path)
    listed = distributed_file.read_list(folder)
    options: dict[str, dict[str, Any]] = {}
    steps: dict[str, float] = {}
    tensors: dict[str, Listed] = {}
    befores, others = set(), {}
    for entry, of in listed.items():
        match = ENTRY.fullmatch(entry)
        if not match:
            others[entry] = of
            continue
        befores.add(match["before"])
        name, key = match["of"], match["key"]
        if match["part"] == "param_groups":
            options.setdefault(name, {})[key] = _option(folder, entry, of)
        elif key == STEP:
            steps[name] = _option(folder, entry, of)
        elif of.shape is not None:
            tensors[f"{name}.{key}"] = of
    if len(befores) == 1 and not tensors:
        raise InputError(f"{path} {NO_MOMENTS}")
    numbered = any(PARAMS in group for group in options.values())
    if len(befores) != 1 or (numbered and not all(map(_is_numbered, options.items()))):
        raise InputError(
            f"{path} has no entries of one optimizer like optimizer.state.NAME.exp_avg and "
            "optimizer.param_groups.NAME.lr; save get_optimizer_state_dict(model, optimizer) again"
        )
    groups = _numbered(options) if numbered else _groups(options, parameters)
    carried, becomes = _carried(folder, others, parameters)
    schedules = _take_schedules(path, carried, becomes, groups)
    names = {LIST} | {part.file for listing in listed.values() for part in listing.parts}
    return State(
        FORMAT,
        path,
        tuple(path / name for name in sorted(names)),
        groups,
        steps,
        DistributedFile(folder, tensors),
        partial(_write, path, befores.pop(), numbered, carried, list(schedules)),
        becomes,
        schedules,
    )


def _value(folder: Folder, entry: str, of: Listed) -> Any:
    """Read a plain value or a small tensor."""
    if of.shape is not None:
        return DistributedFile(folder, {entry: of}).read(entry)
    with distributed_file.explain_entry(folder, entry):
        (place,) = of.parts
        if place.length > MAX_VALUE:
            raise ValueError(f"it has more than {MAX_VALUE:,} bytes")
        with folder.open(place.file) as stream:
            stream.seek(place.offset)
            return torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)


def _option(folder: Folder, entry: str, of: Listed) -> Any:
    """Read an option of a group, or a step; tensors with one number become floats."""
    if of.shape is not None and prod(of.shape) != 1:
        raise InputError(f"{entry} in {folder} has shape {list(of.shape)}; {REMEDY}")

    def number(value: Any) -> Any:
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    return tree_map(number, _value(folder, entry, of))


def _carried(
    folder: Folder, entries: Mapping[str, Listed], parameters: Parameters
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of entries that are carried over, and the action for all entries, by first name."""
    values: dict[str, Any] = {}
    becomes: dict[str, str] = {}
    for entry, of in entries.items():
        known = entry in parameters.shapes or entry.removeprefix("model.") in parameters.shapes
        if known or prod(of.shape or ()) > 1:
            becomes.setdefault(WEIGHTS, "left: they are in the files of the model")
            continue
        first = entry.partition(".")[0]
        try:
            values[entry] = _value(folder, entry, of)
            becomes.setdefault(first, CARRIED)
        except InputError:
            becomes[first] = "left: it holds more than plain values"
    return values, becomes


def _take_schedules(
    path: Path, values: dict[str, Any], becomes: dict[str, str], groups: Sequence[ParamGroup]
) -> dict[str, dict[str, Any]]:
    """Remove the entries of schedules; return those that grow, by the prefix of their names.

    Raises:
        InputError: groups have different rates, and their order is unknown.
    """
    schedules: dict[str, dict[str, Any]] = {}
    by_parent: dict[str, dict[str, Any]] = {}
    for entry, value in values.items():
        before, dot, key = entry.rpartition(".")
        by_parent.setdefault(before + dot, {})[key] = value
    for parent, kept in by_parent.items():
        if not is_schedule(kept):
            continue
        for key in kept:
            del values[f"{parent}{key}"]
        known = read_schedule(kept, str(path), len(groups))
        becomes[f"{parent}{min(kept)}".partition(".")[0]] = SCALED if known else LEFT
        if known is None:
            continue
        schedules[parent] = known
        for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
            own, of_groups = known[key], [group.options.get(option) for group in groups]
            if any(value != own[0] for value in own) and own != of_groups:
                raise InputError(
                    f"{parent}{key} in {path} differs between groups, whose order torch does not "
                    "keep; save the schedule elsewhere, with the names of the parameters"
                )
    return schedules


def _groups(options: Mapping[str, dict[str, Any]], parameters: Parameters) -> list[ParamGroup]:
    """Group parameters with the same options."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys((*parameters.shapes, *options)):
        if name in options:
            alike.setdefault(repr(sorted(options[name].items())), []).append(name)
    return [ParamGroup(tuple(names), options[names[0]]) for names in alike.values()]


def _is_numbered(group: tuple[str, dict[str, Any]]) -> bool:
    """Whether a group has a number, and a list of the names of its parameters."""
    number, options = group
    names = options.get(PARAMS)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return number.isascii() and number.isdecimal() and is_list


def _numbered(options: Mapping[str, dict[str, Any]]) -> list[ParamGroup]:
    """Groups in the order of their numbers."""
    return [
        ParamGroup(tuple(of[PARAMS]), {key: of[key] for key in of if key != PARAMS})
        for _, of in sorted(options.items(), key=lambda group: int(group[0]))
    ]


def _write(
    source: Path,
    before: str,
    numbered: bool,
    carried: Mapping[str, Any],
    parents: Sequence[str],
    grown: TargetState,
    folder: Path,
    save: Save,
) -> None:
    """Write a state.

    Args:
        source: the folder of the source's state.
        before: prefix of the names of entries.
        numbered: whether groups have numbers.
        carried: values of entries that belong neither to the optimizer nor to a schedule.
        parents: prefixes of the entries of schedules.
        grown: see ``State.write``.
        folder: see ``State.write``.
        save: see ``State.write``.
    """
    subfolder = folder / (source.name if ACCELERATE_STATE.fullmatch(source.name) else FOLDER)
    subfolder.mkdir()
    shards = distributed_file.distributed_shards(grown.tensors, SHARD_BYTES)
    save(grown, subfolder, shards)
    values = dict(carried)
    for number, group in enumerate(grown.groups):
        options = {**group.options, **({PARAMS: list(group.parameters)} if numbered else {})}
        for owner in [number] if numbered else group.parameters:
            for key, value in options.items():
                values[f"{before}param_groups.{owner}.{key}"] = value
    schedules = grown.schedules()
    values |= {f"{parent}{key}": of for parent in parents for key, of in schedules[parent].items()}
    names = {f"{before}state.{key}": key for key in grown.tensors}
    distributed_file.write_list(shards, subfolder, names, values, partial(_path, before, numbered))


def _path(before: str, numbered: bool, entry: str) -> tuple[str | int, ...]:
    """The path of an entry in the nested state that torch loads."""
    parent, match = before.split(".")[:-1], ENTRY.fullmatch(entry)
    if numbered and match:
        owner = int(match["of"]) if match["part"] == "param_groups" else match["of"]
        return *parent, match["part"], owner, match["key"]
    return (*parent, entry.removeprefix(before)) if entry.startswith(before) else (entry,)


NAME = "torch.distributed.checkpoint"
FORMAT = StateFormat(
    NAME, (FOLDER, "optimizer_[0-9]*"), lambda path: (path / LIST).is_file(), _open
)
