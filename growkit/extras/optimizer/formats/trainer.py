"""``optimizer.pt`` of ``Trainer``: parameters by number, in the order of its groups.

A checkpoint folder of ``Trainer`` may have the state of FSDP2's shards instead (``optimizer_0``),
which is a folder of torch.distributed.checkpoint.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.serialization import skip_data

from growkit.base.errors import InputError
from growkit.base.torch_internals import tree_flatten, tree_unflatten
from growkit.extras.formats.distributed_file import LIST
from growkit.extras.formats.torch_archive import checksum_places, placeholder, save_archive
from growkit.extras.optimizer.formats import dcp as distributed
from growkit.extras.optimizer.param_groups import Parameters, ParamGroup, class_name
from growkit.extras.optimizer.schedule import LEFT, read_schedule
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
from growkit.model.checkpoint.weight_file import (
    Select,
    TorchFile,
    open_saved,
)
from growkit.model.checkpoint.writing import Save, Shard

NAME, BIN = "optimizer.pt", "optimizer.bin"
SHARDED = "optimizer_0"
"""Name of the folder with the state of FSDP2's shards."""

SCHEDULE, PROGRESS = "scheduler.pt", "trainer_state.json"
BEST = ("best_model_checkpoint", "best_metric", "best_global_step")
"""Keys in ``trainer_state.json`` for a checkpoint of the source, which must not be loaded."""

ELSE = ("rng_state*.pth", "scaler.pt")
"""Files that do not depend on the model: random generators, and the scale of losses in float16."""

CODE = "training_args.bin"
BECOMES = {
    SCHEDULE: SCALED,
    PROGRESS: "carried over, without the best checkpoint, which is one of the source",
    CODE: "left: it is code; give Trainer the arguments of the source again",
}
"""Actions for the files next to ``optimizer.pt``."""

HIDDEN = "matrices between embedding and head"
"""Matrices that Muon trains, in the description of an order."""

PARAMETER_KEYS = ("params", "param_names")
"""Keys of a group that are not options."""

EXPECTED_STATE = "torch.save(optimizer.state_dict()) was expected"

MAX_PICKLE = 1 << 25
"""Limit for everything but the data of tensors, in bytes; 50,000 parameters take as much."""

KIND = TorchFile("the state of an optimizer", "save optimizer.state_dict() again", MAX_PICKLE)


def _open(path: Path, parameters: Parameters) -> State:
    if not path.is_dir():
        return _open_file(path, parameters)
    folder = Folder(path)
    known = (NAME, BIN, *BECOMES, *ELSE)
    names = [name for name in folder.names(*known) if folder.find(name)]
    if _is_sharded(path):
        state = distributed.FORMAT.open(path / SHARDED, parameters)
    else:
        state = _open_file(path / (NAME if NAME in names else BIN), parameters)
    becomes = {name: BECOMES[name] for name in BECOMES if name in names}
    carried = [name for name in names if name not in (NAME, BIN, *BECOMES) and "/" not in name]
    becomes |= dict.fromkeys(carried, CARRIED)
    schedules = _check_rest(folder, becomes, carried, len(state.groups))
    return replace(
        state,
        files=(*state.files, *(path / name for name in becomes if name != CODE)),
        write=partial(_write_folder, state.write, folder, carried),
        beside={**state.beside, **becomes},
        schedules={**state.schedules, **schedules},
    )


def _is_sharded(path: Path) -> bool:
    """Whether a folder has the state of shards."""
    return (path / SHARDED / LIST).is_file()


def _open_file(file: Path, parameters: Parameters) -> State:
    content, select = open_saved(Folder(file.parent), file.name, KIND)
    state, groups = _parts(file, content)
    by_name, assumed, names = _named(file, state, groups, parameters)
    name_of = dict(zip(_ids(groups), chain.from_iterable(names), strict=True))
    named = {name_of[number]: kept for number, kept in state.items()}
    steps = {name: kept[STEP] for name, kept in named.items() if _is_one(kept.get(STEP))}
    moments = {
        f"{name}.{kind}": value
        for name, kept in named.items()
        for kind, value in kept.items()
        if kind != STEP or name not in steps
    }
    options = [{k: v for k, v in group.items() if k not in PARAMETER_KEYS} for group in groups]
    steps, *options = _with_numbers(select, [steps, *options])
    for key, value in moments.items():
        if not isinstance(value, Tensor):
            name, _, kind = key.rpartition(".")
            raise InputError(
                f"{file} holds {kind} of {name} in a form that AdamW and Muon do not have; "
                "leave --optimizer out, or save the optimizer again"
            )
    return State(
        FORMAT,
        file,
        (file,),
        [ParamGroup(tuple(of), settings) for of, settings in zip(names, options, strict=True)],
        steps,
        select(lambda _: moments),
        partial(_write, by_name, BIN if file.name == BIN else NAME),
        assumed=assumed,
    )


def _is_one(value: Any) -> bool:
    """Whether a value is a number, or a tensor with one number."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _with_numbers(select: Select, content: Any) -> Any:
    """Replace tensors with one number by the number, also in pairs such as ``betas``."""
    leaves, structure = tree_flatten(content)
    every = {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    scalars = {place: tensor for place, tensor in every.items() if tensor.numel() == 1}
    numbers = select(lambda _: scalars)
    for place in scalars:
        leaves[int(place)] = float(numbers.read(place))
    return tree_unflatten(leaves, structure)


def _check_rest(
    folder: Folder, becomes: dict[str, str], carried: Sequence[str], groups: int
) -> dict[str, Any]:
    """Refuse damaged files and code next to a state; return the schedule by its file."""
    from transformers.trainer_pt_utils import safe_globals

    if PROGRESS in becomes:
        folder.json(PROGRESS)
    for name in carried:
        with safe_globals():  # as in Trainer
            open_saved(folder, name, KIND)
    if SCHEDULE not in becomes:
        return {}
    schedule, select = open_saved(folder, SCHEDULE, KIND)
    select(_no_tensors)
    known = read_schedule(schedule, str(folder.path / SCHEDULE), groups)
    if known is None:
        becomes[SCHEDULE] = LEFT
        return {}
    return {SCHEDULE: known}


def _no_tensors(content: Any) -> dict[str, Tensor]:
    """Refuse tensors in a schedule, which is written with ``torch.save``.

    Raises:
        ValueError: there is one.
    """

    def plain(value: Any) -> str:
        if isinstance(value, Tensor):
            raise ValueError("a schedule holds no tensors")
        return str(value)

    json.dumps(content, default=plain)
    return {}


def _write_folder(
    write: Callable[[TargetState, Path, Save], None],
    source: Folder,
    carried: Sequence[str],
    grown: TargetState,
    folder: Path,
    save: Save,
) -> None:
    """Write a state and the files of the training run beside it.

    Args:
        write: writes the state itself.
        source: the folder of the source's state.
        carried: files in that folder that are copied.
        grown: see ``State.write``.
        folder: see ``State.write``.
        save: see ``State.write``.
    """
    write(grown, folder, save)
    if schedule := grown.schedules().get(SCHEDULE):
        with (folder / SCHEDULE).open("wb") as stream:
            save_archive(schedule, stream)
    for name in carried:
        source.copy(name, folder)
    if source.find(PROGRESS):
        progress = source.json(PROGRESS)
        progress |= {key: None for key in BEST if key in progress}
        (folder / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n", "utf-8")


def _write(by_name: bool, file: str, grown: TargetState, folder: Path, save: Save) -> None:
    """Write a state.

    Args:
        by_name: whether parameters have names and not numbers.
        file: the name of the file.
        grown: see ``State.write``.
        folder: see ``State.write``.
        save: see ``State.write``.
    """
    every = [name for group in grown.groups for name in group.parameters]
    ids: dict[str, Any] = {name: name if by_name else place for place, name in enumerate(every)}
    content: dict[str, Any] = {"state": {}, "param_groups": []}
    for key, info in grown.tensors.items():
        name, _, kind = key.rpartition(".")
        content["state"].setdefault(ids[name], {})[kind] = placeholder(info)
    for group in grown.groups:
        names = list(group.parameters)  # after the split, numbers alone would be ambiguous
        members = {"params": [ids[name] for name in names], "param_names": names}
        content["param_groups"].append({**group.options, **members})
    named = {number: name for name, number in ids.items()}

    def tensors(content: Any) -> dict[str, Tensor]:
        state = content["state"]
        return {f"{named[n]}.{kind}": t for n in state for kind, t in state[n].items()}

    leaving_room = skip_data(materialize_fake_tensors=True)
    with (folder / file).open("wb") as stream, leaving_room:
        save_archive(content, stream)
    places = open_saved(Folder(folder), file, KIND)[1](tensors).places
    offsets = {key: places[key].begin for key in sorted(places, key=lambda key: places[key].begin)}
    headers = {key: grown.tensors[key] for key in offsets}
    checksums = checksum_places(folder / file, offsets)
    save(grown, folder, [Shard(file, headers, {}, offsets, checksums)])


# Names of parameters


def _ids(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The identifiers of parameters in all groups, in order."""
    return [identifier for group in groups for identifier in group["params"]]


def _named(
    file: Path,
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    parameters: Parameters,
) -> tuple[bool, str, list[list[str]]]:
    """Find the names of the parameters of every group.

    Returns:
        Whether parameters have names and not numbers; the order that was assumed, empty if the file
        has names; and the names.

    Raises:
        InputError: the file is not an optimizer's state, or belongs to another model.
    """
    every = _ids(groups)
    if len(set(every)) < len(every) or not set(state) <= set(every):
        raise InputError(
            f"{file} has a parameter in two groups, or in none; {EXPECTED_STATE}, save it again"
        )
    by_name = all(isinstance(identifier, str) for identifier in every)
    key = "params" if by_name else "param_names"
    listed = [[class_name(str(name)) for name in group.get(key, [])] for group in groups]
    if all(len(of) == len(group["params"]) for of, group in zip(listed, groups, strict=True)):
        return by_name, "", listed
    if any(listed):
        raise InputError(
            f"{file} names {sum(map(len, listed)):,} of its {len(every):,} parameters in "
            f"param_names; {EXPECTED_STATE}, save it again"
        )
    return by_name, *_fitting(file, [group["params"] for group in groups], state, parameters)


def _fitting(
    file: Path, ids: list[list[Any]], state: Mapping[Any, Any], parameters: Parameters
) -> tuple[str, list[list[str]]]:
    """Find the only customary order that fits the numbers and shapes of parameters.

    Returns:
        A description of the order, and the names in it.

    Raises:
        InputError: no order fits, or several do.
    """
    lengths = list(map(len, ids))
    shapes = [_shape(state.get(number)) for number in chain.from_iterable(ids)]

    def fits(order: list[list[str]]) -> bool:
        pairs = zip(chain.from_iterable(order), shapes, strict=True)
        return all(shape in (None, parameters.shapes[name]) for name, shape in pairs)

    orders: dict[str, list[list[str]]] = {}
    for custom, order in _orders(parameters):
        if list(map(len, order)) == lengths and order not in orders.values():
            orders[custom] = order
    if len(orders) > 1:  # else a wrong shape is reported later
        orders = {custom: order for custom, order in orders.items() if fits(order)}
    if len(orders) == 1:
        return next(iter(orders.items()))
    if orders:
        raise InputError(
            f"{file} has no names of parameters, and more than one order of them fits; "
            "create the optimizer with model.named_parameters() and save it again"
        )
    raise InputError(
        f"{file} holds {sum(lengths)} parameters in groups of {', '.join(map(str, lengths))}, "
        f"which are not the {len(parameters.shapes)} of the model in {parameters.where} as "
        f"Trainer orders them; give the state of its own optimizer, or create that with "
        "model.named_parameters(), so that it saves names"
    )


def _parts(file: Path, content: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Check the contents of a file; return the state and the groups of the optimizer.

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
        or not all(isinstance(identifier, int | str) for g in groups for identifier in g["params"])
    ):
        raise InputError(f"{file} does not hold the state of an optimizer; {EXPECTED_STATE}")
    if not any(state.values()):
        raise InputError(f"{file} {NO_MOMENTS}")
    return state, groups


def _orders(parameters: Parameters) -> Iterator[tuple[str, list[list[str]]]]:
    """Customary groups of parameters, each with a description: Trainer's first, then others."""
    every, hidden = list(parameters.shapes), parameters.hidden_matrices
    matrices = [name for name in every if len(parameters.shapes[name]) > 1]
    rest = [name for name in every if name not in hidden]
    for names, which in ((every, ""), (rest, f", without {HIDDEN}")):
        for order, first in (
            ("in Trainer's groups, decayed ones", parameters.decayed),
            ("matrices", {*matrices}),
        ):
            split = [[n for n in names if n in first], [n for n in names if n not in first]]
            yield f"{order} first{which}", split
            yield f"{order} last{which}", split[::-1]
        yield f"all in one group{which}", [names]
        yield f"a group for each{which}", [[name] for name in names]
    yield HIDDEN, [[name for name in every if name in hidden]]
    yield "matrices", [matrices]


def _shape(kept: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """The shape of a parameter, from its moments; None if they do not show it."""
    moments = (
        [kept[kind] for kind in ("exp_avg", "momentum_buffer") if kind in kept] if kept else []
    )
    return tuple(moments[0].shape) if moments and isinstance(moments[0], Tensor) else None


FORMAT = StateFormat(
    "optimizer.pt",
    (NAME, BIN, SHARDED, SCHEDULE, PROGRESS, *ELSE),
    lambda path: (
        path.is_file() or _is_sharded(path) or any((path / name).is_file() for name in (NAME, BIN))
    ),
    _open,
)
