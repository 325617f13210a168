"""A Universal Checkpoint of DeepSpeed: a folder for every parameter, by its name.

In ``zero/NAME`` lie ``exp_avg.pt``, ``exp_avg_sq.pt``, ``fp32.pt`` (the weights in full precision,
which grow as weights do) and ``step.pt``; in ``zero/optimizer_state.pt`` what is common to all of
them. The loader wants one step for all parameters of a group, so those that begin without moments
take over that of the others. Of classes of DeepSpeed in ``optimizer_state.pt``, such as a loss
scaler, nothing is run or taken over: the loader has its own where there are none.

In ``*model_states.pt`` beside ``zero`` the engine looks for its counters and the schedule of the
rates. They are taken over without the weights in there, which a universal load passes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import TensorInfo
from growkit.checkpoint.torch_file import Kind, open_saved, room
from growkit.checkpoint.weight_file import Place, WeightFile, row_by_row
from growkit.checkpoint.writing import fill
from growkit.errors import InputError, foreign
from growkit.optimizer.groups import Group
from growkit.optimizer.holes import MOST_PICKLE, save
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.schedule import grown_schedule, holds_schedule
from growkit.optimizer.state import (
    ADAMW,
    CARRIED,
    MASTER,
    SCALED,
    STEP,
    WITHOUT_RATES,
    Grown,
    State,
    as_float,
)

RANKS = "*model_states.pt"
"""What each of the processes kept of the model and the engine."""

SCHEDULE = "lr_scheduler"
"""What the engine calls the schedule in these files."""

SHAPED = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names")
"""What in these files is of the source alone, beside its weights."""

TAG, LATEST = "universal", "latest_universal"
ZERO, COMMON = "zero", "optimizer_state.pt"
PARAM = "param"
NAMES = "param_names"
"""What torch calls the list of a group's parameters, if it has one; DeepSpeed has none."""

INNER = "optimizer_state_dict"
"""Where stage 3 keeps step and groups."""

KINDS = (*sorted(ADAMW), MASTER)
KIND = Kind("a part of a Universal Checkpoint", "make it again with ds_to_universal")
PLAIN = (bool, int, float, str, type(None))

OWN = "deepspeed"
"""The package whose classes are passed over."""

UNDERSTOOD = {"cat_dim", "vocab_tensor"}
"""What may be said of a tensor that grows like any other: how its parts were joined, long since."""

MOST_NAME = 1 << 12
"""Bytes of the file with the name of a checkpoint."""


@dataclass(frozen=True)
class _Rest:
    """What is handed on to the writing.

    Attributes:
        common: what is plain in ``optimizer_state.pt``.
        inner: whether step and groups stand where stage 3 looks for them.
        bare: whether tensors are saved flat and alone, as for stage 3.
        beside: for every tensor what is saved beside it.
    """

    common: Mapping[str, Any]
    inner: bool
    bare: bool
    beside: Mapping[str, Mapping[str, Any]]


@dataclass
class _Numbers:
    """The tensors of a checkpoint, each in a file; see ``growkit.optimizer.state.Numbers``."""

    files: dict[str, WeightFile] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The header of each."""
        return {name: file.tensors[name] for name, file in self.files.items()}

    def by_rows(self, name: str) -> bool:
        """See ``Numbers``."""
        return self.files[name].by_rows(name)

    def read(self, name: str, rows: slice | None, columns: slice | None = None) -> Tensor:
        """See ``Numbers``."""
        return self.files[name].read(name, rows, columns)


class _Universal:
    name = "Universal Checkpoint of DeepSpeed"
    outputs = (TAG, LATEST)

    def holds(self, path: Path) -> bool:
        """See ``Format``."""
        return (_zero(path) / COMMON).is_file()

    def open(self, path: Path, parameters: Parameters) -> State:
        """See ``Format``."""
        zero = _zero(path)
        folder = Folder(zero)
        common, step = _common(folder)
        files, numbers = [zero / COMMON], _Numbers()
        beside: dict[str, Mapping[str, Any]] = {}
        steps: dict[str, float] = {}
        for name in _names(folder):
            inside = Folder(zero / name)
            for kind in KINDS:
                file, key = f"{kind}.pt", f"{name}.{kind}"
                if not inside.find(file):
                    continue
                shape = parameters.shapes.get(name, ())
                files.append(inside.path / file)
                pick = partial(_tensor_of, key)
                content, numbers.files[key] = open_saved(inside, file, pick, KIND, MOST_PICKLE)
                if not isinstance(content, dict):
                    numbers.files[key].places = _in_shape(numbers.files[key].places, shape)
                beside[key] = _beside(inside.path / file, content)
            found = _step(inside, f"{STEP}.pt", files)
            found = step if found is None else found
            if found is not None:
                steps[name] = found
        if len(set(steps.values())) > 1:
            raise InputError(
                f"{path} has parameters after {min(steps.values()):g} steps and others after "
                f"{max(steps.values()):g}, where DeepSpeed wants one number; {KIND.remedy}"
            )
        groups, assumed = _groups(path, common["param_groups"], parameters)
        bare = all(PARAM not in each for each in beside.values())
        ranks, others = _ranks(Folder(zero.parent), files)
        rest = _Rest(common, step is not None, bare, beside)
        return State(self, path, tuple(files), groups, steps, numbers, rest, others, ranks, assumed)

    def write(
        self, state: State, grown: Grown, folder: Path, advance: Callable[[int], None]
    ) -> None:
        """See ``Format``."""
        rest: _Rest = state.rest
        (folder / LATEST).write_text(TAG, encoding="utf-8")
        zero = folder / TAG / ZERO
        places: dict[str, tuple[Path, int]] = {}
        step = max(grown.steps.values(), default=0.0)
        for key, info in grown.tensors.items():
            name, _, kind = key.rpartition(".")
            file = zero / name / f"{kind}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            if kind == STEP:
                if not rest.inner:
                    torch.save(torch.tensor(step), file)
                continue
            content: Any = room(TensorInfo((info.elements,), info.dtype) if rest.bare else info)
            if not rest.bare:
                content = {**rest.beside.get(key, {}), PARAM: content}
            places |= save(content, file, partial(_tensor_of, key), KIND)
        groups = [
            {**group.options, "params": [number], NAMES: list(group.parameters)}
            for number, group in enumerate(grown.groups)
        ]
        common = {**rest.common, "param_groups": groups}
        if rest.inner:
            common[INNER] = {"state": {0: {STEP: int(step)}}, "param_groups": groups}
        torch.save(common, zero / COMMON)
        for where, kept in state.schedules.items():
            made = grown_schedule(kept, where, len(state.groups), grown.groups)
            torch.save(made, zero.parent / Path(where).name)
        tensors = {key: info for key, info in grown.tensors.items() if key in places}
        fill(_Some(tensors, grown.blocks), places, advance)


FORMAT = _Universal()


@dataclass(frozen=True)
class _Some:
    """Some of the tensors of a state."""

    tensors: Mapping[str, TensorInfo]
    blocks: Callable[[str], Iterator[Tensor]]


class _Foreign:
    """Stands for anything of DeepSpeed, and does nothing."""

    def __init__(self, *of: Any) -> None:
        """Take whatever it is made of."""

    def __setstate__(self, state: Any) -> None:
        """Take whatever it is told of itself."""


def _ranks(folder: Folder, files: list[Path]) -> tuple[dict[str, Any], dict[str, str]]:
    """What is plain in the files of processes, by their paths, and what is said of each."""
    found: dict[str, Any] = {}
    said = {}
    for name in folder.names(RANKS):
        if "/" in name:
            continue
        try:
            content = _opened(folder, name, lambda _: {})[0]
        except InputError as error:  # of another framework, which keeps objects of its own there
            said[name] = f"left: {error}"
            continue
        files.append(folder.path / name)
        kept = content.items() if isinstance(content, dict) else ()
        file = str(folder.path / name)
        found[file] = {**_plain({k: v for k, v in kept if k not in SHAPED}), "module": {}}
        how = WITHOUT_RATES if found[file].get(SCHEDULE) else CARRIED
        how = SCALED if holds_schedule(found[file]) else how
        said[name] = f"without the weights in it, {how}"
    return found, said


def _plain(value: Any) -> Any:
    """The same without tensors and whatever DeepSpeed's classes stand for."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not isinstance(each, Tensor | _Foreign)}
        return {key: _plain(each) for key, each in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value if not isinstance(each, Tensor | _Foreign)]
    return value


def _opened(folder: Folder, name: str, tensors: Any) -> tuple[Any, WeightFile]:
    """Read a file in which classes of DeepSpeed may be named, which are passed over."""
    with (
        folder.open(name) as stream,
        foreign(f"{folder.path / name} cannot be read", KIND.remedy),
    ):
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    inert: list[Any] = [(_Foreign, each) for each in unknown if each.startswith(f"{OWN}.")]
    with torch.serialization.safe_globals(inert):
        return open_saved(folder, name, tensors, KIND, MOST_PICKLE, OWN)


def _zero(path: Path) -> Path:
    """The folder with the parameters."""
    latest = path / LATEST
    if latest.is_file() and latest.stat().st_size < MOST_NAME:
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if Path(tag).name == tag:
            path = path / tag
    return path / ZERO if (path / ZERO).is_dir() else path


def _names(folder: Folder) -> list[str]:
    """Of all parameters."""
    return sorted(
        {name.partition("/")[0] for name in folder.names() if name.endswith(".pt")} - {COMMON}
    )


def _common(folder: Folder) -> tuple[dict[str, Any], float | None]:
    """What is plain of that which all parameters have in common, and the step if it is there.

    Raises:
        InputError: it is not as DeepSpeed writes it.
    """
    file = folder.path / COMMON
    found, numbers = _opened(folder, COMMON, _step_in)
    inner = found.get(INNER)
    groups = found.get("param_groups", inner.get("param_groups") if inner else None)
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise InputError(f"{file} has no parameter groups; {KIND.remedy}")
    plain = {key: value for key, value in found.items() if isinstance(value, PLAIN)}
    step = float(numbers.read(STEP, None)) if STEP in numbers.places else _inner_step(inner)
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return {**plain, "param_groups": options}, step


def _inner(content: Any) -> Any:
    """What stage 3 keeps of its first partition; None elsewhere."""
    inner = content.get(INNER) if isinstance(content, dict) else None
    state = inner.get("state") if isinstance(inner, dict) else None
    return state.get(0) if isinstance(state, dict) else None


def _step_in(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise ValueError("it is no dictionary")
    first = _inner(content)
    step = first.get(STEP) if isinstance(first, dict) else None
    return _one(step)


def _inner_step(inner: Any) -> float | None:
    first = _inner({INNER: inner})
    step = first.get(STEP) if isinstance(first, dict) else None
    return as_float(step) if isinstance(step, int | float) else None


def _step(folder: Folder, name: str, files: list[Path]) -> float | None:
    """The step of a parameter; None if it has none of its own."""
    if not folder.find(name):
        return None
    files.append(folder.path / name)
    content, numbers = open_saved(folder, name, _one, KIND, MOST_PICKLE)
    if STEP in numbers.places:
        return float(numbers.read(STEP, None))
    if isinstance(content, bool) or not isinstance(content, int | float):
        raise InputError(f"{folder.path / name} holds no number of steps; {KIND.remedy}")
    return as_float(content)


def _one(content: Any) -> dict[str, Tensor]:
    one = isinstance(content, torch.Tensor) and content.numel() == 1
    return {STEP: content} if one else {}


def _tensor_of(key: str, content: Any) -> dict[str, Tensor]:
    """The tensor of a file.

    Raises:
        ValueError: there is none, or it is a part that a grown model would have otherwise.
    """
    tensor = content.get(PARAM) if isinstance(content, dict) else content
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("it holds no tensor")
    return {key: tensor}


def _beside(file: Path, content: Any) -> Mapping[str, Any]:
    """What is saved beside a tensor: how it was put together.

    Raises:
        InputError: it is no plain value, or says that the tensor is put together otherwise.
    """
    if not isinstance(content, dict):
        return {}
    beside = {key: value for key, value in content.items() if key != PARAM}
    for key, value in beside.items():
        if key not in UNDERSTOOD or not isinstance(value, PLAIN):
            raise InputError(
                f"{file} says {key} of its tensor, which growkit does not know how to grow; give a "
                "checkpoint of a model that was not split by tensors"
            )
    return beside | {PARAM: None}


def _in_shape(places: Mapping[str, Place], shape: tuple[int, ...]) -> dict[str, Place]:
    """Flat tensors in the shape of their parameter, if they have as many numbers."""
    return {
        name: replace(place, info=replace(place.info, shape=shape), strides=row_by_row(shape))
        if len(place.info.shape) == 1 and place.in_order and place.info.elements == prod(shape)
        else place
        for name, place in places.items()
    }


def _groups(
    path: Path, options: list[dict[str, Any]], parameters: Parameters
) -> tuple[list[Group], str]:
    """The parameters of every group: as it lists them, all of them, or as Trainer parts them.

    Returns:
        The groups, and what was assumed of them.

    Raises:
        InputError: there are more groups, and nothing says which parameters are theirs.
    """
    listed = [each.get(NAMES) for each in options]
    if all(isinstance(n, list) and all(isinstance(each, str) for each in n) for n in listed):
        named = [dict(group) for group in options]
        return [Group(tuple(each.pop(NAMES)), each) for each in named], ""
    every, assumed = list(parameters.shapes), ""
    names = [every]
    if len(options) == 2:
        decayed = parameters.decayed
        names = [[n for n in every if n in decayed], [n for n in every if n not in decayed]]
        assumed = "in Trainer's groups, decayed ones first"
    if len(names) != len(options):
        raise InputError(
            f"{path} has {len(options)} parameter groups and does not say which parameters are "
            "theirs; give a checkpoint with one group, or with those of Trainer"
        )
    return [Group(tuple(each), of) for each, of in zip(names, options, strict=True)], assumed
