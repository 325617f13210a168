"""The state of an optimizer, independent of its format, and the check that growkit can grow it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from growkit.base.errors import InputError
from growkit.base.lazy import members
from growkit.base.tensors import Weights
from growkit.extras.optimizer.param_groups import RATES, Parameters, ParamGroup
from growkit.model.checkpoint.writing import Save

ORDERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}
"""The kinds of tensors that grow with the weights, with the power of the gradient in each."""

STEP = "step"

STATE = "optimizer"
"""Beginning of the names of the state's files and folders, in the folder of a model."""

ADAMW = frozenset({"exp_avg", "exp_avg_sq"})
MUON = frozenset({"momentum_buffer"})
KNOWN = (ADAMW, ADAMW | {"max_exp_avg_sq"}, MUON)
"""Sets of moments: AdamW's, AdamW's with ``amsgrad``, and Muon's."""

SCHEDULE_KEYS = {*RATES, "base_momentum", "max_momentum"}


class KnownOptimizer(NamedTuple):
    """An optimizer, recognised by the options of its groups.

    Attributes:
        name: name of the optimizer.
        required: options that it cannot do without; those of each implementation distinguish it
            from optimizers with the same moments.
        known: all numeric options, in torch, DeepSpeed or Apex. Any other number or switch may
            belong to another update rule, such as the bounds of LAMB's trust ratio; text, such as
            the name of a group, may not.
    """

    name: str
    required: tuple[set[str], ...]
    known: set[str]


LAWS = {
    ADAMW: KnownOptimizer(
        "AdamW",
        (
            {"lr", "betas", "eps", "weight_decay", "amsgrad"},
            {"lr", "betas", "eps", "weight_decay", "bias_correction"},
        ),
        SCHEDULE_KEYS
        | {"betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable"}
        | {"differentiable", "fused", "decoupled_weight_decay", "bias_correction", STEP},
    ),
    MUON: KnownOptimizer(
        "Muon",
        ({"lr", "momentum", "weight_decay", "ns_steps"},),
        SCHEDULE_KEYS
        | {"momentum", "nesterov", "weight_decay", "eps"}
        | {"ns_coefficients", "ns_steps", "adjust_lr_fn"},
    ),
}

NO_MOMENTS = (
    "holds no moments: the optimizer has taken no step, or has no moments, such as SGD without "
    "momentum; there is nothing to grow, leave --optimizer out"
)

MAX_STEPS = 2**53

DTYPES = ("F64", "F32", "BF16", "F16")

CARRIED = "carried over"
SCALED = "carried over, with its rates multiplied like those of the groups"
"""Action for a schedule."""


@dataclass(frozen=True)
class State:
    """The state of an optimizer.

    Attributes:
        format: format of the files.
        where: the file or folder.
        files: all files that are read.
        groups: groups of parameters, by their names in the class.
        steps: number of steps of every parameter; empty if the optimizer does not count them.
        numbers: the tensors, by the name ``parameter.kind``.
        write: writes a state that was grown from this one into the folder of its model, block by
            block; called with the state, the folder, and a function that writes shards.
        beside: other files of the training run in the same folder, with the action for each.
        schedules: schedules of the rates, by file or the prefix of their entries; see
            ``growkit.extras.optimizer.schedule.read_schedule``.
        assumed: the assumed order of parameters; empty if the files have their names.
    """

    format: StateFormat
    where: Path
    files: tuple[Path, ...]
    groups: Sequence[ParamGroup]
    steps: Mapping[str, float]
    numbers: Weights
    write: Callable[[TargetState, Path, Save], None]
    beside: Mapping[str, str] = field(default_factory=dict)
    schedules: Mapping[str, Any] = field(default_factory=dict)
    assumed: str = ""

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        """The kinds of tensors that every parameter has."""
        by_parameter: dict[str, set[str]] = {}
        for name in self.numbers.tensors:
            parameter, _, kind = name.rpartition(".")
            by_parameter.setdefault(parameter, set()).add(kind)
        return {parameter: frozenset(kinds) for parameter, kinds in by_parameter.items()}


class TargetState(Weights, ABC):
    """The state of a target's optimizer, as formats write it.

    Attributes:
        state: state of the source's optimizer.
        groups: groups of the target's parameters.
        steps: number of steps that the moments of every parameter have seen.
    """

    state: State
    groups: Sequence[ParamGroup]
    steps: Mapping[str, float]

    @abstractmethod
    def schedules(self) -> dict[str, Any]:
        """The source's schedules for the target's groups, named as in ``State.schedules``."""


@dataclass(frozen=True)
class StateFormat:
    """A format, which its file defines as ``FORMAT``.

    Attributes:
        name: name for users.
        outputs: patterns of the files that it writes into the folder of a model.
        holds: whether a file or folder looks like this format.
        open: reads everything but the data of tensors, for these parameters; raises an
            ``InputError`` if the state is damaged, or belongs to another model or optimizer.
    """

    name: str
    outputs: tuple[str, ...]
    holds: Callable[[Path], bool]
    open: Callable[[Path, Parameters], State]


def state_formats() -> list[StateFormat]:
    """All formats, one per module of the package."""
    return cast(
        "list[StateFormat]", list(members("growkit.extras.optimizer.formats", "FORMAT").values())
    )


def outputs() -> list[str]:
    """Patterns of all files of an optimizer's state in the folder of a model."""
    return [pattern for state_format in state_formats() for pattern in state_format.outputs]


def open_state(path: Path, parameters: Parameters) -> State:
    """Read everything in an optimizer's state but the data of tensors.

    Raises:
        InputError: the format is unknown, or the state is damaged, or belongs to another model or
            optimizer.
    """
    for state_format in state_formats():
        if state_format.holds(path):
            state = state_format.open(path, parameters)
            check_state(state, parameters)
            return state
    known = ", ".join(state_format.name for state_format in state_formats())
    raise InputError(f"{path} holds no optimizer's state that growkit reads; give {known}")


def written_in(folder: Path) -> Path | None:
    """Find the optimizer's state that growkit wrote into a model's folder; None for none."""
    for state_format in state_formats():
        for pattern in state_format.outputs:
            for place in sorted(folder.glob(pattern)) if pattern.startswith(STATE) else ():
                if state_format.holds(place):
                    return place
    return None


def check_state(state: State, parameters: Parameters) -> None:
    """Check a state against the model that it should belong to.

    Raises:
        InputError: it belongs to another model or optimizer, or is incomplete.
    """
    kinds = state.kinds
    _check_moments(state, parameters, kinds)
    grouped = Counter(name for group in state.groups for name in group.parameters)
    for name in (*kinds, *grouped):
        if name not in parameters.shapes:
            raise InputError(
                f"{state.where} has a state of {name}, which the model in {parameters.where} does "
                "not have; give the state of this model's optimizer"
            )
        if grouped[name] != 1:
            raise InputError(
                f"{state.where} has {name} in {grouped[name] or 'no'} groups; one was expected, "
                "save the optimizer again"
            )
    for group in state.groups:
        for name in group.parameters:
            _check_optimizer(state, group, name, kinds[name])
        _check_options(state, group)


def _missing(parameters: Parameters, kinds: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Parameters without moments, although the optimizer trains them.

    It may be Muon, which trains hidden matrices, or the optimizer of all other parameters.
    """
    missing = [name for name in parameters.shapes if name not in kinds]
    hidden, only_muon = parameters.hidden_matrices, set(kinds.values()) == {MUON}
    if hidden != set(missing):
        yield from (name for name in missing if name in hidden or not only_muon)


def _check_moments(
    state: State, parameters: Parameters, kinds: Mapping[str, frozenset[str]]
) -> None:
    """Check that every parameter has moments of its shape."""
    for name in _missing(parameters, kinds):
        for inner in kinds:
            if inner.startswith(f"{name}."):  # names of bitsandbytes' 8-bit moments
                _refuse(state, f"{', '.join(sorted(kinds[inner]))} of {inner}")
        raise InputError(
            f"{state.where} has no state of {name}, which the model in {parameters.where} "
            "has; give the state of an optimizer that has trained all of this model"
        )
    for name, shape in parameters.shapes.items():
        for kind in sorted(kinds.get(name, ())):
            info = state.numbers.tensors[f"{name}.{kind}"]
            if kind not in ORDERS or info.dtype not in DTYPES:
                _refuse(state, f"{kind} of {name} ({info.dtype})")
            if info.shape != shape:
                raise InputError(
                    f"{kind} of {name} in {state.where} has shape {list(info.shape)}, the "
                    f"parameter in {parameters.where} has {list(shape)}; give the state of this "
                    "model's optimizer"
                )


def _check_optimizer(state: State, group: ParamGroup, name: str, kinds: frozenset[str]) -> None:
    if kinds not in KNOWN:
        _refuse(state, f"only {' and '.join(sorted(kinds)) or 'no moment'} of {name}")
    optimizer = MUON if kinds == MUON else ADAMW
    law = LAWS[optimizer]
    step: Any = state.steps.get(name)
    if not any(options <= group.options.keys() for options in law.required):
        missing = min(law.required[0] - group.options.keys())
        _refuse(state, f"{min(kinds)} in a group without {missing}")
    if kinds == ADAMW and group.options.get("amsgrad"):
        _refuse(state, f"no max_exp_avg_sq of {name}, whose group has amsgrad")
    for key, value in group.options.items():
        remark = all(part is None or isinstance(part, str) for part in _parts(value))
        if key not in law.known and not remark:
            _refuse(
                state,
                f"{key} = {str(value)[:40]} in a group of parameters, an option that {law.name} "
                "does not have",
                f"; remove {key} from the groups if it is only a remark of yours",
            )
    counted = is_number(step) and 0 <= step < MAX_STEPS and step % 1 == 0
    if not counted and (step is not None or optimizer == ADAMW):
        shown = f"{step:g}" if is_number(step) else str(step)[:40]
        raise InputError(
            f"the step of {name} in {state.where} is {shown}; a whole number of steps "
            "was expected, save the optimizer again"
        )


def _check_options(state: State, group: ParamGroup) -> None:
    """Check that all values of options are plain, and that numbers can be scaled."""
    for key, value in group.options.items():
        parts = _parts(value)
        fit = all(isinstance(part, bool | int | float | str | None) for part in parts)
        if key in (*RATES, "weight_decay", "eps"):
            unset = value is None and key not in ("lr", "weight_decay", "eps")
            fit &= unset or (is_number(value) and value >= 0)
        if key == "betas":
            fit &= len(parts) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in parts)
        if not fit:
            raise InputError(
                f"{key} of a group in {state.where} is {str(value)[:40]}, which no optimizer "
                "takes; save it again"
            )


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def is_number(value: Any) -> bool:
    """Whether a value is a number that a finite float can hold, and not a bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _refuse(state: State, what: str, remedy: str = "") -> None:
    raise InputError(
        f"{state.where} holds {what}, so it is of another optimizer; growkit grows that of AdamW, "
        f"with or without amsgrad, and of Muon{remedy}"
    )
