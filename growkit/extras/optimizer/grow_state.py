"""Growth of an optimizer's state: moments go through the transforms of the weights.

The state is read and checked before anything is written, and is streamed after the weights.

One parameter of the class may combine several tensors of the files, such as experts. Its moments
are split into those of the tensors, grown with them, and combined again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.algebra.update_law import Update
from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.progress import current
from growkit.base.tensors import TensorInfo, Weights, cut
from growkit.engine.class_weights import ClassWeights, one_row, stacks
from growkit.engine.loader import Conversion, by_parameter, loading
from growkit.engine.transformers_class import require_class
from growkit.extras.composed_transforms import Computed
from growkit.extras.optimizer.moment_transforms import moments_of
from growkit.extras.optimizer.param_groups import (
    UNTRAINABLE,
    Factors,
    Parameters,
    ParamGroup,
    class_updates,
)
from growkit.extras.optimizer.results.optimizer_growth import OptimizerResult
from growkit.extras.optimizer.schedule import grown_schedule
from growkit.extras.optimizer.state import MUON, ORDERS, STEP, State, TargetState, open_state
from growkit.extras.optimizer.stored_gradients import StoredGradients, Unconverted
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.writing import Hashes, write_shards
from growkit.model.model import Model
from growkit.planning.own_class import substitute
from growkit.planning.plan import Lineage, Plan, Planned, Rule
from growkit.planning.transforms import Constant
from growkit.planning.updates import Law

COMPUTED_TENSOR = "there are no moments for a computed tensor"

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments."""

DECOUPLED = "decoupled_weight_decay"
"""Option of Adam and AdamW, whether weight decay is no part of the gradient; from torch 2.7 on."""

Moments = dict[str, dict[str, Tensor]]
"""AdamW's moments in memory, by parameter and by ``MOMENTS``."""


class Optimizer:
    """The optimizer of a source, whose state grows with the model.

    Args:
        path: path of the optimizer's state.
        source: the checkpoint that it trained.
        lineage: the plans from the source to the target.

    Attributes:
        state: the source's state.
        files: all files that growkit reads.
        bytes: approximate size of the grown state.

    Raises:
        InputError: see ``open_state``; or transformers has no class for the source.
    """

    def __init__(self, path: Path, source: Checkpoint, lineage: Lineage) -> None:
        self._lineage = lineage
        require_class(lineage.target.config, f"the grown {source.folder}", UNTRAINABLE)
        self._before = Parameters.of(source)
        self.state = open_state(path, self._before)
        self.files = self.state.files
        headers = self.state.numbers.tensors
        kinds = {name.rpartition(".")[2]: info.dtype for name, info in headers.items()}
        elements = tensors.total_parameters(lineage.target.tensors)
        self.bytes = sum(elements * tensors.FLOAT_BYTES[dtype] for dtype in kinds.values())

    @property
    def warnings(self) -> list[str]:
        """A warning if Adam's state cannot be told from AdamW's, whose decay grows differently."""
        kinds = self.state.kinds
        decays = any(
            group.options.get("weight_decay") and DECOUPLED not in group.options
            for group in self.state.groups
            if any(kinds.get(name) != MUON for name in group.parameters)
        )
        assumed = (
            f"weight decay in {self.state.where} was taken for AdamW's, as its groups, of torch "
            f"before 2.7, do not say; if it is Adam's, which is part of the gradient, set "
            f"{DECOUPLED} to False in them"
        )
        return [assumed] if decays else []

    def grown(self, target: Checkpoint, law: Law) -> GrownState:
        """Make the state of the target's optimizer.

        Args:
            target: the target; headers are enough.
            law: the law of updates of the target.

        Raises:
            InputError: transformers has no class for the target.
        """
        updates = class_updates(target, law.updates, by_element=False)
        return GrownState(self.state, self._lineage, self._before, Parameters.of(target), updates)

    def write(self, folder: Path, law: Law, hashes: Hashes) -> OptimizerResult:
        """Write the grown state into the folder of the written target.

        Args:
            folder: folder of the target.
            law: the law of updates of the target.
            hashes: receives the hashes of the files.

        Raises:
            InputError: the state cannot be read, or transformers has no class for the target.
        """
        grown = self.grown(Checkpoint(folder), law)
        with current().bytes("optimizer", tensors.total_bytes(grown.tensors)) as advance:
            self.state.write(grown, folder, partial(write_shards, advance=advance, hashes=hashes))
        return self.result(grown)

    def result(self, grown: GrownState | None = None) -> OptimizerResult:
        """Describe the growth, as planned or, given the grown state, as written."""
        state = self.state
        steps = [step for step in state.steps.values() if step]
        return OptimizerResult(
            path=str(state.where),
            format=state.format.name,
            moments=sorted({kind for kinds in state.kinds.values() for kind in kinds}),
            step=int(max(steps)) if steps else None,
            groups=len(grown.groups) if grown else len(state.groups),
            bytes=tensors.total_bytes(grown.tensors) if grown else self.bytes,
            reset=dict(grown.reset) if grown else {},
            beside=dict(state.beside),
            assumed=state.assumed,
        )


class GrownState(TargetState):
    """The state of a grown model's optimizer, computed while it is written.

    Args:
        state: state of the source's optimizer.
        lineage: the plans from the source to the target.
        before: parameters of the source.
        after: parameters of the target.
        updates: the law of updates of the target's parameters, by name.

    Attributes:
        state: state of the source's optimizer.
        groups: groups of the target's parameters.
        steps: step count of every parameter; 0 for those in ``reset``.
        tensors: the header of every tensor, by the name ``parameter.kind``.
        reset: parameters that start without moments, with the reason.
    """

    def __init__(
        self,
        state: State,
        lineage: Lineage,
        before: Parameters,
        after: Parameters,
        updates: Mapping[str, Update],
    ) -> None:
        self.state, self._before, self._after = state, before, after
        self._lineage = lineage
        self._made = {}
        for kind in sorted({kind for kinds in state.kinds.values() for kind in kinds}):
            stage: Model = _StoredMoments(state, kind, before, lineage.source)
            for plan in lineage.plans:
                stage = _grow_moments(plan, stage, ORDERS[kind])
            self._made[kind] = _for_class(stage, after.conversions)
        groups = self._assign_groups()
        self.reset = {
            name: self._why(name)
            for group, known in groups
            for name in group.parameters
            if not all(name in self._made[kind].tensors for kind in known)
        }
        self.groups = [
            part
            for number, (group, known) in enumerate(groups)
            for part in group.split(self._factors(group, known, updates), number)
        ]
        self.steps = {
            name: 0.0 if name in self.reset else state.steps[self._origins[name]]
            for group, known in groups
            for name in group.parameters
            if self._origins.get(name) in state.steps
            or (name in self.reset and state.steps and known != MUON)
        }
        self.tensors = {
            f"{name}.{kind}": self._info(name, kind)
            for group, known in groups
            for name in group.parameters
            for kind in sorted(known)
        } | {f"{name}.{STEP}": TensorInfo((), "F32") for name in self.steps}
        self._fixed = Planned(state.numbers, Plan({}, tuple(self._rules())))

    def schedules(self) -> dict[str, Any]:
        """Grow the schedules in the state, by their names in ``State.schedules``."""
        return {
            name: grown_schedule(schedule, self.groups)
            for name, schedule in self.state.schedules.items()
        }

    def _rules(self) -> Iterator[Rule]:
        """What begins anew, and the steps."""
        for key, info in self.tensors.items():
            name, _, kind = key.rpartition(".")
            if kind == STEP or name in self.reset:
                value = self.steps[name] if kind == STEP else 0.0
                yield Rule(key, info, Constant(info.dtype, value, self.reset.get(name, STEP)))

    def _held(self, key: str) -> tuple[Weights, str]:
        """The weights that hold a tensor, and its name there."""
        name, _, kind = key.rpartition(".")
        return (self._fixed, key) if key in self._fixed.tensors else (self._made[kind], name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor, as consecutive blocks along dimension 0."""
        weights, own = self._held(name)
        for block in weights.blocks(own):
            yield block.to(self.tensors[name].torch_dtype)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        weights, own = self._held(name)
        return weights.read(own, *where).to(self.tensors[name].torch_dtype)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        weights, own = self._held(name)
        return weights.cuts(own)

    @cached_property
    def _origins(self) -> dict[str, str]:
        """For each parameter of the target, the first of the source from which it is made."""
        parameter = {
            tensor: name
            for conversion in self._before.conversions
            for name in conversion.shapes
            for tensor in conversion.sources
        }
        origins: dict[str, str] = {}
        for conversion in self._after.conversions:
            named = [
                parameter[name]
                for target in conversion.sources
                if target in self._lineage.plans[-1].by_target
                for name in self._lineage.replaced(target)
                if parameter.get(name) in self._before.shapes
            ]
            origins |= {name: named[0] for name in conversion.shapes if named}
        return origins

    def _factors(
        self, group: ParamGroup, kinds: frozenset[str], updates: Mapping[str, Update]
    ) -> dict[str, Factors]:
        """Factors of the settings of a group's parameters, which have these kinds of moments."""
        adjusted = str(group.options.get("adjust_lr_fn") or "original")
        muon = adjusted if kinds == MUON else None
        # This option is false in Adam, whose weight decay is part of the gradient.
        coupled = group.options.get(DECOUPLED) is False
        return {
            name: Factors.of(updates[name], self._after.shapes[name], muon, coupled=coupled)
            for name in group.parameters
            if name in updates
        }

    def _assign_groups(self) -> list[tuple[ParamGroup, frozenset[str]]]:
        """Assign the target's parameters to the source's groups, with the moments that these have.

        A grown parameter stays in its group. A new parameter joins a group with the same weight
        decay, and preferably the same number of dimensions: some give decay only to matrices. Of
        several optimizers, it joins the one that trains hidden matrices, or all else.
        """
        kinds, groups = self.state.kinds, self.state.groups
        number_of = {name: number for number, of in enumerate(groups) for name in of.parameters}
        by_muon = {name: kinds[name] == MUON for name in number_of}
        trains = {name in self._before.hidden_matrices: by_muon[name] for name in number_of}
        alike: dict[object, int] = {}
        for name, number in number_of.items():
            for trait in (*_traits(self._before, name), None):
                alike.setdefault((by_muon[name], trait), number)
        names: list[list[str]] = [[] for _ in groups]
        for name, shape in self._after.shapes.items():
            origin = self._origins.get(name)
            if origin is None or (by_muon.get(origin) and len(shape) != 2):  # as experts are
                if (muon := trains.get(name in self._after.hidden_matrices)) is not None:
                    traits = ((muon, trait) for trait in (*_traits(self._after, name), None))
                    names[next(alike[key] for key in traits if key in alike)].append(name)
            elif origin in number_of:  # otherwise another optimizer trains it
                names[number_of[origin]].append(name)
        assigned = []
        for group, of in zip(groups, names, strict=True):
            # Parameters of a group have the same moments, except those that never had a gradient.
            known = [kinds[name] for name in group.parameters]
            shared = frozenset.intersection(*known) if known else frozenset[str]()
            assigned.append((ParamGroup(tuple(of), group.options), shared))
        return assigned

    def _info(self, name: str, kind: str) -> TensorInfo:
        header = self._made[kind].tensors.get(name)
        if header is not None:
            return header
        headers = self.state.numbers.tensors.items()
        dtype = next(info.dtype for key, info in headers if key.endswith(f".{kind}"))
        return TensorInfo(self._after.shapes[name], _moments_dtype(dtype))

    def _why(self, name: str) -> str:
        """The reason why a parameter has no moments, preferably in the words of the plan."""
        for conversion in self._after.conversions:
            for target in conversion.sources if name in conversion.shapes else ():
                for rules in self._lineage.steps(target):
                    for rule in rules:
                        if not rule.sources or moments_of(rule.transform, 1) is None:
                            return rule.why
        return COMPUTED_TENSOR


def _traits(parameters: Parameters, name: str) -> tuple[object, object]:
    """Traits that decide on a parameter's group, the more specific first."""
    is_decayed = name in parameters.decayed
    return (is_decayed, len(parameters.shapes[name]) > 1), is_decayed


def _for_class(stage: Model, conversions: Sequence[Conversion]) -> ClassWeights:
    """Convert moments to parameters of the class, if all tensors of a parameter have them."""
    complete = [
        conversion for conversion in conversions if stage.tensors.keys() >= set(conversion.sources)
    ]
    return ClassWeights(stage, tuple(complete))


def _grow_moments(plan: Plan, stage: Model, order: int) -> Planned:
    """Apply one step to one kind of moments, for targets whose sources all have them."""
    rules = []
    for rule in plan.rules:
        how = moments_of(rule.transform, order)
        # New tensors have no moments yet.
        if how is None or isinstance(how, Constant) or not stage.tensors.keys() >= {*how.sources}:
            continue
        dtype = stage.tensors[how.sources[0]].dtype if how.sources else "F32"
        rules.append(Rule(rule.target, replace(rule.info, dtype=dtype), how))
    return Planned(stage, replace(plan, rules=tuple(rules), duplicates={}))


def _moments_dtype(dtype: str) -> str:
    """The dtype in which moments grow: in float16, divided squares would become zero."""
    return "F32" if dtype == "F16" else dtype


class _StoredMoments(Model):
    """One kind of an optimizer's tensors, with the names and shapes of the model's files.

    Args:
        state: state of the optimizer.
        kind: the kind of tensors, e.g. ``exp_avg``.
        parameters: parameters of the model.
        model: the model.
    """

    def __init__(self, state: State, kind: str, parameters: Parameters, model: Model) -> None:
        self._state, self._kind = state, kind
        self.config = model.config
        self._unconverted = Unconverted(model.tensors)
        numbers = state.numbers.tensors
        self._conversions: dict[str, Conversion] = {}
        self.tensors = {}
        for conversion in parameters.conversions:
            if any(f"{name}.{kind}" not in numbers for name in conversion.shapes):
                continue
            if conversion.transform is not None:
                part = one_row(conversion, 0) if stacks(conversion) else conversion
                if self._unconverted.places(part) is None:
                    continue
            dtype = _moments_dtype(numbers[f"{next(iter(conversion.shapes))}.{kind}"].dtype)
            for tensor in conversion.sources:
                self._conversions[tensor] = conversion
                self.tensors[tensor] = TensorInfo(model.tensors[tensor].shape, dtype)

    def where(self, name: str | None = None) -> str:
        """See ``Weights``; the file or folder of the state."""
        return str(self._state.where)

    def cuts(self, name: str) -> int:
        """See ``Weights``; converted tensors are read whole."""
        conversion = self._conversions[name]
        (first, *_) = conversion.shapes
        plain = conversion.transform is None
        return self._state.numbers.cuts(f"{first}.{self._kind}") if plain else 0

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``.

        Raises:
            InputError: the moments are not finite, or squares are negative.
        """
        conversion = self._conversions[name]
        if conversion.transform is None:
            return self._numbers(next(iter(conversion.shapes)), *where)
        part: slice | None = None
        if stacks(conversion):
            number = next(n.index(name) for n in conversion.tensors.values() if name in n)
            conversion, part = one_row(conversion, number), slice(number, number + 1)
        by_parameter = {
            parameter: self._numbers(parameter, part) for parameter in conversion.shapes
        }
        restored = self._unconverted(conversion, by_parameter)
        assert restored is not None, f"{name} has no way back"
        return cut(dict(restored)[name], where)

    def _numbers(self, parameter: str, *where: slice | None) -> Tensor:
        tensor = self._state.numbers.read(f"{parameter}.{self._kind}", *where)
        wrong = "NaN or infinity" if not tensor.isfinite().all() else ""
        if not wrong and ORDERS[self._kind] == 2 and tensor.numel() and tensor.min() < 0:
            wrong = "negative squares"
        if wrong:
            raise InputError(
                f"{self._kind} of {parameter} in {self._state.where} holds {wrong}; use the state "
                "of an earlier checkpoint"
            )
        return tensor.float() if tensor.dtype == torch.float16 else tensor


def _in_memory(contents: Mapping[str, Tensor], model: Model) -> Planned:
    """A model's moments in memory, in float64."""
    rules = []
    for name, tensor in contents.items():
        computed = Computed((), "in memory", partial(Tensor.detach, tensor), dtype="F64")
        rules.append(Rule(name, TensorInfo(tuple(tensor.shape), "F64"), computed))
    return Planned(model, Plan(model.config, tuple(rules)))


def grown_moments(
    moments: Moments, before: Checkpoint, after: Checkpoint, plans: Sequence[Plan]
) -> Moments:
    """Grow moments in memory; those without a transform become zero.

    Args:
        moments: moments of the source's parameters.
        before: the source.
        after: the target.
        plans: plans of all steps from the source to the target.
    """
    if own := substitute(after.config):
        plans = (*plans, own.plan(after))
        shapes = {rule.target: rule.info.shape for rule in plans[-1].rules}
    else:
        conversions = loading(after).conversions
        shapes = {name: of.shapes[name] for name, of in by_parameter(conversions).items()}
    grown: Moments = {name: {} for name in shapes}
    for kind in MOMENTS:
        stored = StoredGradients(before)
        contents = {n: t for name, of in moments.items() for n, t in stored(name, of[kind].cpu())}
        stage: Model = _in_memory(contents, before)
        for plan in plans:
            stage = _grow_moments(plan, stage, ORDERS[kind])
        weights = stage if own else _for_class(stage, conversions)
        for name, shape in shapes.items():
            empty = torch.zeros(shape, dtype=torch.float64)
            grown[name][kind] = weights.read(name).double() if name in weights.tensors else empty
    return grown
