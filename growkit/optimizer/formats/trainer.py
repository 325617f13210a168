"""``optimizer.pt`` as ``Trainer`` writes it: parameters by number, in the order of its groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.weight_file import TorchFile, WeightFile, open_saved, room
from growkit.checkpoint.writing import Hashes, Shard, write_shards
from growkit.optimizer.groups import ParamGroup
from growkit.optimizer.growing import GrownState
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.schedule import grown_schedule, holds_schedule
from growkit.optimizer.state import (
    CARRIED,
    NO_MOMENTS,
    SCALED,
    STEP,
    WITHOUT_RATES,
    State,
    as_float,
)

if TYPE_CHECKING:
    from torch import Tensor

NAME, BIN = "optimizer.pt", "optimizer.bin"
SCHEDULE, PROGRESS = "scheduler.pt", "trainer_state.json"
BEST = ("best_model_checkpoint", "best_metric", "best_global_step")
"""In ``trainer_state.json``: a checkpoint of the source, which the grown model cannot load."""

ELSE = ("rng_state*.pth", "scaler.pt")
"""What does not depend on the model: random generators, and the scale of losses in float16."""

CODE = "training_args.bin"
BECOMES = {
    SCHEDULE: SCALED,
    PROGRESS: "carried over, but for the best checkpoint, which is one of the source",
    CODE: "left: it is code; give Trainer the arguments of the source again",
}
"""What becomes of the files next to ``optimizer.pt``."""

WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What wrappers put before or into the names of parameters."""

OF_TORCH = "torch.save(optimizer.state_dict()) was expected"

MOST_PICKLE = 1 << 25
"""Bytes of what a state holds apart from numbers; fifty thousand parameters take as many."""

KIND = TorchFile("the state of an optimizer", "save optimizer.state_dict() again", MOST_PICKLE)

Tensors = Callable[[Any], "dict[str, Tensor]"]
"""Takes what was saved, and gives its tensors by name."""


def _open(folder: Folder, name: str, tensors: Tensors) -> tuple[Any, WeightFile]:
    return open_saved(folder, name, tensors, KIND)


@dataclass(frozen=True)
class _Rest:
    """What reading passes to writing.

    Attributes:
        by_name: whether parameters go by name rather than by number.
        file: the name of the file.
        folder: that has it, if a folder was given.
        carried: files that are copied.
    """

    by_name: bool
    file: str
    folder: Folder | None
    carried: Sequence[str]


class _Trainer:
    name = "optimizer.pt"
    outputs: tuple[str, ...] = (NAME, BIN, SCHEDULE, PROGRESS, *ELSE)

    def holds(self, path: Path) -> bool:
        """See ``Format``."""
        return path.is_file() or any((path / name).is_file() for name in (NAME, BIN))

    def open(self, path: Path, parameters: Parameters) -> State:
        """See ``Format``."""
        folder = Folder(path) if path.is_dir() else None
        known = (NAME, BIN, *BECOMES, *ELSE)
        names = [name for name in folder.names(*known) if folder.find(name)] if folder else []
        file = path / (NAME if NAME in names else BIN) if folder else path
        saved = _Saved(file, parameters)
        content, numbers = _open(Folder(file.parent), file.name, saved.tensors)
        steps, groups = dict(saved.steps), []
        for number, group in enumerate(content["param_groups"]):
            options = {
                key: _value(numbers, f"{number}.{key}", value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            groups.append(ParamGroup(tuple(saved.names[number]), options))
        for key in [key for key in numbers.tensors if key.endswith(f".{STEP}")]:
            steps[key.removesuffix(f".{STEP}")] = float(numbers.read(key))
        numbers.tensors = {
            key: info
            for key, info in numbers.tensors.items()
            # Options have the number of a group in the place of a parameter's name.
            if not (key.partition(".")[0].isdigit() or key.endswith(f".{STEP}"))
        }
        beside = {name: BECOMES[name] for name in BECOMES if name in names}
        carried = [name for name in names if name not in (NAME, BIN, *BECOMES) and "/" not in name]
        beside |= dict.fromkeys(carried, CARRIED)
        schedules = _looked_at(folder, beside, carried) if folder else {}
        rest = _Rest(saved.by_name, BIN if file.name == BIN else NAME, folder, carried)
        files = (file, *(path / name for name in beside if name != CODE))
        assumed = saved.assumed
        return State(self, file, files, groups, steps, numbers, rest, beside, schedules, assumed)

    def write(
        self,
        state: State,
        grown: GrownState,
        folder: Path,
        advance: Callable[[int], None],
        hashes: Hashes,
    ) -> None:
        """See ``Format``."""
        import torch
        from torch.serialization import skip_data

        rest: _Rest = state.rest
        every = [name for group in grown.groups for name in group.parameters]
        ids: dict[str, Any] = {n: n if rest.by_name else place for place, n in enumerate(every)}
        content: dict[str, Any] = {"state": {}, "param_groups": []}
        for key, info in grown.tensors.items():
            name, _, kind = key.rpartition(".")
            content["state"].setdefault(ids[name], {})[kind] = room(info)
        for group in grown.groups:
            names = list(group.parameters)  # which numbers alone would not tell any more
            made = {"params": [ids[name] for name in names], "param_names": names}
            content["param_groups"].append({**group.options, **made})
        for where, schedule in state.schedules.items():
            made = grown_schedule(schedule, where, len(state.groups), grown.groups)
            torch.save(made, folder / SCHEDULE)
        if rest.folder and rest.folder.find(PROGRESS):
            progress = rest.folder.json(PROGRESS)
            progress |= {key: None for key in BEST if key in progress}
            (folder / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n", "utf-8")
        for name in rest.carried:
            assert rest.folder
            (folder / name).write_bytes(rest.folder.bytes(name))
        named = {number: name for name, number in ids.items()}

        def tensors(content: Any) -> dict[str, Tensor]:
            state = content["state"]
            return {f"{named[n]}.{kind}": t for n in state for kind, t in state[n].items()}

        with skip_data(materialize_fake_tensors=True):  # room for the numbers
            torch.save(content, folder / rest.file)
        _, written = _open(Folder(folder), rest.file, tensors)
        offsets = {key: place.begin for key, place in written.places.items()}
        in_order = {key: grown.tensors[key] for key in sorted(offsets, key=offsets.__getitem__)}
        shard = Shard(rest.file, in_order, {}, offsets)
        write_shards(grown, folder, [shard], advance, hashes)


FORMAT = _Trainer()


def _looked_at(folder: Folder, beside: dict[str, str], carried: Sequence[str]) -> dict[str, Any]:
    """Refuse damaged files and code next to a state; the schedule, by the file that it is in."""
    from transformers.trainer_pt_utils import safe_globals

    if PROGRESS in beside:
        folder.json(PROGRESS)
    for name in carried:
        with safe_globals():  # those with which Trainer reads it
            _open(folder, name, lambda _: {})
    if SCHEDULE not in beside:
        return {}
    schedule, _ = _open(folder, SCHEDULE, _no_tensors)
    if not holds_schedule(schedule):
        beside[SCHEDULE] = WITHOUT_RATES
    return {str(folder.path / SCHEDULE): schedule}


class _Saved:
    """What an optimizer saved, once it is known which parameter is which.

    Args:
        file: that it is in.
        parameters: of the model.

    Attributes:
        names: of the parameters of every group.
        steps: the numbers that are no tensors.
        by_name: whether parameters go by name rather than by number.
        assumed: the order of the parameters, where nothing names them.
    """

    def __init__(self, file: Path, parameters: Parameters) -> None:
        self._file, self._parameters = file, parameters
        self.names: list[list[str]] = []
        self.steps: dict[str, float] = {}
        self.by_name, self.assumed = False, ""

    def tensors(self, content: Any) -> dict[str, Tensor]:
        """Find out which parameter is which, and give all tensors under their names.

        Raises:
            InputError: it is no optimizer's state, or of another model.
        """
        import torch

        file = self._file
        state, groups = _parts(file, content)
        ids = [list(group["params"]) for group in groups]
        every = list(chain.from_iterable(ids))
        if len(set(every)) < len(every) or not set(state) <= set(every):
            raise InputError(
                f"{file} has a parameter in two groups, or in none; {OF_TORCH}, save it again"
            )
        self.by_name = all(isinstance(each, str) for each in every)
        listed = [[str(each) for each in group.get("param_names", [])] for group in groups]
        if self.by_name:
            listed = ids
        if list(map(len, listed)) == list(map(len, ids)):
            self.names = [[unwrapped(each) for each in group] for group in listed]
        else:
            self.names = self._fitting(ids, state)
        name_of = dict(zip(every, chain.from_iterable(self.names), strict=True))
        found = {}
        for number, kept in state.items():
            for kind, value in kept.items():
                if isinstance(value, torch.Tensor) and (kind != STEP or value.numel() == 1):
                    found[f"{name_of[number]}.{kind}"] = value
                elif kind == STEP and isinstance(value, int | float) and type(value) is not bool:
                    self.steps[name_of[number]] = as_float(value)
                else:
                    raise InputError(
                        f"{file} holds {kind} of {name_of[number]} in a form in which AdamW and "
                        "Muon have none; leave --optimizer out, or save the optimizer again"
                    )
        for number, group in enumerate(groups):
            for key, value in group.items():
                found |= _tensors_in(f"{number}.{key}", value)
        return found

    def _fitting(self, ids: list[list[Any]], state: Mapping[Any, Any]) -> list[list[str]]:
        """The names in the only order, of those customary, that fits numbers and shapes.

        Raises:
            InputError: none fits, or several do.
        """
        file, parameters = self._file, self._parameters
        lengths = list(map(len, ids))
        shapes = [_shape(state.get(number)) for number in chain.from_iterable(ids)]
        fitting: dict[str, list[list[str]]] = {}
        misfit = ""
        for custom, order in _orders(parameters):
            if list(map(len, order)) != lengths or order in fitting.values():
                continue
            pairs = zip(chain.from_iterable(order), shapes, strict=True)
            wrong = [(n, s) for n, s in pairs if s is not None and s != parameters.shapes[n]]
            if not wrong:
                fitting[custom] = order
            elif not misfit:
                name, shape = wrong[0]
                misfit = (
                    f"; what should be {name} has shape {list(shape)}, the parameter "
                    f"{list(parameters.shapes[name])}"
                )
        if len(fitting) == 1:
            ((self.assumed, found),) = fitting.items()
            return found
        if fitting:
            raise InputError(
                f"{file} does not tell which parameter is which, and more than one order fits; "
                "make the optimizer with model.named_parameters() and save it again"
            )
        raise InputError(
            f"{file} holds {sum(lengths)} parameters in groups of {', '.join(map(str, lengths))}, "
            f"which are not the {len(parameters.shapes)} of the model in {parameters.where} as "
            f"Trainer orders them{misfit}; give the state of its own optimizer, or make that with "
            "model.named_parameters(), so that it saves names"
        )


def _parts(file: Path, content: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """The state and the groups of an optimizer.

    Raises:
        InputError: the file holds something else.
    """
    state = content.get("state") if isinstance(content, dict) else None
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if (
        not isinstance(state, dict)
        or not isinstance(groups, list)
        or not all(isinstance(kept, dict) for kept in state.values())
        or not all(isinstance(kind, str) for kept in state.values() for kind in kept)
        or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        or not all(isinstance(key, str) for group in groups for key in group)
        or not all(isinstance(each, int | str) for g in groups for each in g["params"])
    ):
        raise InputError(f"{file} does not hold the state of an optimizer; {OF_TORCH}")
    if not any(state.values()):
        raise InputError(f"{file} {NO_MOMENTS}")
    return state, groups


def _orders(parameters: Parameters) -> Iterator[tuple[str, list[list[str]]]]:
    """The groups in which optimizers are given parameters: Trainer's first, then other customs."""
    every = list(parameters.shapes)
    matrices = [name for name in every if len(parameters.shapes[name]) > 1]

    def parted(first: Sequence[str] | frozenset[str]) -> list[list[str]]:
        return [[n for n in every if n in first], [n for n in every if n not in first]]

    yield "in Trainer's groups, decayed ones first", parted(parameters.decayed)
    yield "in Trainer's groups, decayed ones last", parted(parameters.decayed)[::-1]
    yield "matrices first", parted(matrices)
    yield "matrices last", parted(matrices)[::-1]
    yield "all in one group", [every]
    yield "a group for each", [[name] for name in every]
    inner = [name for name in matrices if name not in parameters.vocabulary]
    yield "matrices between embedding and head", [inner]
    yield "matrices", [matrices]


def _shape(kept: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """The shape of the parameter that something is kept of; None if that does not tell."""
    import torch

    found = [kept[kind] for kind in ("exp_avg", "momentum_buffer") if kind in kept] if kept else []
    return tuple(found[0].shape) if found and isinstance(found[0], torch.Tensor) else None


def unwrapped(name: str) -> str:
    """A name without what wrappers of a model add to it."""
    for each in WRAPPED:
        name = name.replace(each, "")
    return name


def _tensors_in(key: str, value: Any) -> dict[str, Tensor]:
    """An option of a group, or its parts, that are tensors of one number."""
    import torch

    if isinstance(value, list | tuple):
        parts = [_tensors_in(f"{key}.{place}", each) for place, each in enumerate(value)]
        return {name: tensor for part in parts for name, tensor in part.items()}
    return {key: value} if isinstance(value, torch.Tensor) and value.numel() == 1 else {}


def _value(numbers: WeightFile, key: str, value: Any) -> Any:
    """An option of a group; a rate that is a tensor is read."""
    if isinstance(value, list | tuple):
        parts = (_value(numbers, f"{key}.{place}", each) for place, each in enumerate(value))
        return list(parts) if isinstance(value, list) else tuple(parts)
    return float(numbers.read(key)) if key in numbers.tensors else value


def _no_tensors(content: Any) -> dict[str, Tensor]:
    """Refuse tensors in what is written as it was read.

    Raises:
        ValueError: there is one.
    """
    import torch

    def plain(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            raise ValueError("a schedule holds no tensors")
        return str(value)

    json.dumps(content, default=plain)
    return {}
