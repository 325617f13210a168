"""``optimizer.pt`` as ``Trainer`` writes it: parameters by number, in the order of its groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.weight_file import TorchFile, open_saved, room
from growkit.checkpoint.writing import fill
from growkit.optimizer.groups import Group
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.schedule import grown_schedule, holds_schedule
from growkit.optimizer.state import (
    CARRIED,
    NO_MOMENTS,
    SCALED,
    STEP,
    WITHOUT_RATES,
    Grown,
    State,
    as_float,
)

if TYPE_CHECKING:
    from torch import Tensor


MOST_PICKLE = 1 << 25
"""Bytes of what a state holds beside numbers; fifty thousand parameters take as many."""


def save(
    content: Any, file: Path, tensors: Callable[[Any], dict[str, Tensor]], kind: TorchFile
) -> dict[str, tuple[Path, int]]:
    """Save what has room for tensors, but no numbers.

    Args:
        content: as it will be loaded.
        file: to be written.
        tensors: takes the content and gives its tensors by name.
        kind: what the file holds.

    Returns:
        The file and the offset in it where every tensor belongs.
    """
    import torch
    from torch.serialization import skip_data

    with skip_data(materialize_fake_tensors=True):
        torch.save(content, file)
    _, saved = open_saved(Folder(file.parent), file.name, tensors, kind)
    return {name: (file, place.begin) for name, place in saved.places.items()}


NAME, BIN = "optimizer.pt", "optimizer.bin"
SCHEDULE, PROGRESS = "scheduler.pt", "trainer_state.json"
BEST = ("best_model_checkpoint", "best_metric", "best_global_step")
"""In ``trainer_state.json``: a checkpoint of the source, which the grown model cannot load."""

ELSE = ("rng_state*.pth", "scaler.pt")
"""What does not depend on the model: random generators, and the scale of losses in float16."""

BECOMES = {
    SCHEDULE: SCALED,
    PROGRESS: "carried over, but for the best checkpoint, which is one of the source",
    "training_args.bin": "left: it is code; give Trainer the arguments of the source again",
}
"""What becomes of what lies beside ``optimizer.pt``."""

KIND = TorchFile("the state of an optimizer", "save optimizer.state_dict() again", MOST_PICKLE)

WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What wrappers put before or into the names of parameters."""

OF_TORCH = "torch.save(optimizer.state_dict()) was expected"


@dataclass
class _Saved:
    """What an optimizer saved, once it is known which parameter is which.

    Attributes:
        names: of the parameters of every group.
        steps: the numbers that are no tensors.
        by_name: whether parameters go by name rather than by number.
        listed: whether groups list the names of their parameters.
        assumed: the order of the parameters, where nothing names them.
    """

    names: list[list[str]] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    by_name: bool = False
    listed: bool = False
    assumed: str = ""


@dataclass(frozen=True)
class _Rest:
    """What is handed on to the writing."""

    saved: _Saved
    file: str
    folder: Folder | None
    others: Sequence[str]


class _Trainer:
    name = "optimizer.pt"
    outputs: tuple[str, ...] = (NAME, BIN, SCHEDULE, PROGRESS, *ELSE)

    def holds(self, path: Path) -> bool:
        """See ``Format``."""
        return path.is_file() or any((path / name).is_file() for name in (NAME, BIN))

    def open(self, path: Path, parameters: Parameters) -> State:
        """See ``Format``."""
        from transformers.trainer_pt_utils import safe_globals

        folder = Folder(path) if path.is_dir() else None
        inside = [name for name in (NAME, BIN) if folder and folder.find(name)]
        file = path / inside[0] if inside else path
        saved = _Saved()
        known = partial(_recognised, saved, file, parameters)
        content, numbers = open_saved(Folder(file.parent), file.name, known, KIND)
        files, schedules = [file], {}
        for name in (SCHEDULE, PROGRESS):
            if folder and folder.find(name):
                files.append(path / name)
        if folder and folder.find(SCHEDULE):
            content_of, _ = open_saved(folder, SCHEDULE, _no_tensors, KIND)
            schedules = {str(path / SCHEDULE): content_of}
        if folder and folder.find(PROGRESS):
            folder.json(PROGRESS)
        others = [name for name in folder.names(*ELSE) if "/" not in name] if folder else []
        for name in others:
            assert folder
            files.append(path / name)
            with safe_globals():  # those with which Trainer reads it
                open_saved(folder, name, lambda _: {}, KIND)
        beside = {name: how for name, how in BECOMES.items() if folder and folder.find(name)}
        beside |= dict.fromkeys(others, CARRIED)
        if schedules and not holds_schedule(schedules):
            beside[SCHEDULE] = WITHOUT_RATES
        steps, options = dict(saved.steps), []
        for number, group in enumerate(content["param_groups"]):
            read = {k: _value(numbers, f"{number}.{k}", v) for k, v in group.items()}
            options.append({k: v for k, v in read.items() if k not in ("params", "param_names")})
        for key in [key for key in numbers.places if key.endswith(f".{STEP}")]:
            steps[key.removesuffix(f".{STEP}")] = float(numbers.read(key, None))
        numbers.tensors = {
            key: info
            for key, info in numbers.tensors.items()
            if not (_is_option(key) or key.endswith(f".{STEP}"))
        }
        groups = [
            Group(tuple(names), each) for names, each in zip(saved.names, options, strict=True)
        ]
        rest = _Rest(saved, BIN if file.name == BIN else NAME, folder, others)
        return State(
            self, file, tuple(files), groups, steps, numbers, rest, beside, schedules, saved.assumed
        )

    def write(
        self, state: State, grown: Grown, folder: Path, advance: Callable[[int], None]
    ) -> None:
        """See ``Format``."""
        rest: _Rest = state.rest
        saved = rest.saved
        every = [name for group in grown.groups for name in group.parameters]
        ids: dict[str, Any] = {name: name for name in every}
        if not saved.by_name:
            ids = {name: number for number, name in enumerate(every)}
        content: dict[str, Any] = {"state": {}, "param_groups": []}
        for key, info in grown.tensors.items():
            name, _, kind = key.rpartition(".")
            content["state"].setdefault(ids[name], {})[kind] = room(info)
        for group in grown.groups:
            names = list(group.parameters)  # which numbers alone would not tell any more
            made = {"params": [ids[name] for name in names], "param_names": names}
            content["param_groups"].append({**group.options, **made})
        if state.schedules:
            import torch

            ((where, schedule),) = state.schedules.items()
            made = grown_schedule(schedule, where, len(state.groups), grown.groups)
            torch.save(made, folder / SCHEDULE)
        if rest.folder and rest.folder.find(PROGRESS):
            progress = rest.folder.json(PROGRESS)
            progress |= {key: None for key in BEST if key in progress}
            (folder / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n", "utf-8")
        for name in rest.others:
            assert rest.folder
            (folder / name).write_bytes(rest.folder.bytes(name))
        named = {number: name for name, number in ids.items()}
        places = save(content, folder / rest.file, partial(_tensors_of, named), KIND)
        fill(grown, places, advance)


FORMAT = _Trainer()


def _recognised(
    saved: _Saved, file: Path, parameters: Parameters, content: Any
) -> dict[str, Tensor]:
    """Find out which parameter is which, and give all tensors under their names."""
    import torch

    state, groups = _parts(file, content)
    ids = [list(group["params"]) for group in groups]
    every = list(chain.from_iterable(ids))
    if len(set(every)) < len(every) or not set(state) <= set(every):
        raise InputError(
            f"{file} has a parameter in two groups, or in none; {OF_TORCH}, save it again"
        )
    saved.by_name = all(isinstance(each, str) for each in every)
    saved.listed = all("param_names" in group for group in groups)
    saved.names = _named(saved, file, ids, groups, state, parameters)
    name_of = dict(zip(every, chain.from_iterable(saved.names), strict=True))
    found = {}
    for number, kept in state.items():
        for kind, value in kept.items():
            if isinstance(value, torch.Tensor) and (kind != STEP or value.numel() == 1):
                found[f"{name_of[number]}.{kind}"] = value
            elif kind == STEP and isinstance(value, int | float) and not isinstance(value, bool):
                saved.steps[name_of[number]] = as_float(value)
            else:
                raise InputError(
                    f"{file} holds {kind} of {name_of[number]} in a form in which AdamW and Muon "
                    "have none; leave --optimizer out, or save the optimizer again"
                )
    for number, group in enumerate(groups):
        for key, value in group.items():
            parts = (
                {f".{place}": each for place, each in enumerate(value)} if _several(value) else {}
            )
            for place, each in (parts or {"": value}).items():
                if isinstance(each, torch.Tensor) and each.numel() == 1:
                    found[f"{number}.{key}{place}"] = each
    return found


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


def _named(
    saved: _Saved,
    file: Path,
    ids: list[list[Any]],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    parameters: Parameters,
) -> list[list[str]]:
    """The names of all parameters, group by group.

    They stand in the file, or follow from the order in which optimizers are given parameters: the
    one that fits the number and the shapes of what was saved.

    Raises:
        InputError: none fits, or several do.
    """
    if saved.by_name:
        return [[unwrapped(each) for each in group] for group in ids]
    if saved.listed:
        listed = [[unwrapped(str(each)) for each in group["param_names"]] for group in groups]
        if [len(each) for each in listed] == [len(each) for each in ids]:
            return listed
    count, known = sum(map(len, ids)), len(parameters.shapes)
    lengths = [len(each) for each in ids]
    shapes = [_shape(state.get(number)) for number in chain.from_iterable(ids)]
    fitting: dict[str, list[list[str]]] = {}
    misfit = ""
    for custom, order in _orders(parameters):
        if [len(each) for each in order] != lengths or order in fitting.values():
            continue
        flat = list(chain.from_iterable(order))
        wrong = [
            (name, shape)
            for name, shape in zip(flat, shapes, strict=True)
            if shape is not None and shape != parameters.shapes[name]
        ]
        if not wrong:
            fitting[custom] = order
        elif not misfit:
            name, shape = wrong[0]
            misfit = (
                f"; what should be {name} has shape {list(shape or ())}, the parameter "
                f"{list(parameters.shapes[name])}"
            )
    if len(fitting) == 1:
        ((saved.assumed, found),) = fitting.items()
        return found
    if fitting:
        raise InputError(
            f"{file} does not tell which parameter is which, and more than one order fits; make "
            "the optimizer with model.named_parameters() and save it again"
        )
    raise InputError(
        f"{file} holds {count} parameters in groups of {', '.join(map(str, lengths))}, which are "
        f"not the {known} of the model in {parameters.where} as Trainer orders them{misfit}; give "
        "the state of its own optimizer, or make that with model.named_parameters(), so that it "
        "saves names"
    )


def _orders(parameters: Parameters) -> Iterator[tuple[str, list[list[str]]]]:
    """The groups in which optimizers are given parameters: Trainer's first, then other customs."""
    every = list(parameters.shapes)
    matrices = [name for name in every if len(parameters.shapes[name]) > 1]
    inner = [name for name in matrices if name not in parameters.vocabulary]
    yield "in Trainer's groups, decayed ones first", _parted(every, parameters.decayed)
    yield "in Trainer's groups, decayed ones last", _parted(every, parameters.decayed)[::-1]
    yield "matrices first", _parted(every, matrices)
    yield "matrices last", _parted(every, matrices)[::-1]
    yield "all in one group", [every]
    yield "a group for each", [[name] for name in every]
    yield "matrices between embedding and head", [inner]
    yield "matrices", [matrices]


def _parted(every: Sequence[str], first: Sequence[str] | frozenset[str]) -> list[list[str]]:
    chosen = set(first)
    return [[n for n in every if n in chosen], [n for n in every if n not in chosen]]


def _shape(kept: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Of the parameter that something is kept of; None if that does not tell."""
    import torch

    kinds = ("exp_avg", "momentum_buffer")
    found = [kept[kind] for kind in kinds if kind in kept] if kept else []
    return tuple(found[0].shape) if found and isinstance(found[0], torch.Tensor) else None


def unwrapped(name: str) -> str:
    """A name without what wrappers of a model add to it."""
    for each in WRAPPED:
        name = name.replace(each, "")
    return name


def _is_option(key: str) -> bool:
    """Whether a tensor is an option of a group: these have a number for the parameter's name."""
    return key.partition(".")[0].isdigit()


def _several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _value(numbers: Any, key: str, value: Any) -> Any:
    """An option of a group; a rate that is a tensor is read."""
    if _several(value):
        parts = (_value(numbers, f"{key}.{place}", each) for place, each in enumerate(value))
        return list(parts) if isinstance(value, list) else tuple(parts)
    return float(numbers.read(key, None)) if key in numbers.places else value


def _tensors_of(named: Mapping[Any, str], content: Any) -> dict[str, Tensor]:
    return {
        f"{named[number]}.{kind}": value
        for number, kept in content["state"].items()
        for kind, value in kept.items()
    }


def _no_tensors(content: Any) -> dict[str, Tensor]:
    """Refuse tensors in what is written as it was read.

    Raises:
        ValueError: there is one.
    """
    json.dumps(content, default=_plain)
    return {}


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        raise ValueError("a schedule holds no tensors")
    return str(value)
