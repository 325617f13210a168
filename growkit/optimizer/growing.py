"""Grow the state of the source's optimizer through the transforms of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from growkit.checkpoint.tensors import ANYWHERE, TORCH_NAMES, TensorInfo, Weights, full
from growkit.engine.class_weights import ClassWeights
from growkit.optimizer.groups import Group, split
from growkit.optimizer.of_kind import OfKind, moments_dtype
from growkit.optimizer.parameters import Parameters
from growkit.optimizer.state import ORDERS, STEP, Grown, State
from growkit.planning.factors import Factors
from growkit.planning.lineage import Lineage
from growkit.planning.plan import Plan, Planned, Rule
from growkit.planning.transforms import Constant

if TYPE_CHECKING:
    from torch import Tensor

OF_COMPUTED = "moments do not go through what is computed"


class GrownState(Grown):
    """The state of a grown model's optimizer, computed while it is written.

    Args:
        state: of the source's optimizer.
        lineage: from the source to the target.
        before: the parameters of the source.
        after: those of the target.
        factors: by what the law of updates scales options of parameters of the target.

    Attributes:
        groups: of the target's parameters.
        steps: that every parameter has taken, as far as its moments tell.
        tensors: the header of every tensor, by the name ``parameter.kind``.
        reset: parameters that begin with no moments, and why.
    """

    def __init__(
        self,
        state: State,
        lineage: Lineage,
        before: Parameters,
        after: Parameters,
        factors: Mapping[str, Factors],
    ) -> None:
        self._state, self._before, self._after = state, before, after
        self._lineage = lineage
        kinds = sorted({kind for each in state.kinds.values() for kind in each})
        self._stages = {kind: self._grown(kind) for kind in kinds}
        self._classes = {
            kind: ClassWeights(cast(Any, stage), _made_of(after, stage))
            for kind, stage in self._stages.items()
        }
        groups = self._grouped()
        self.reset = {
            name: self._why(name)
            for group, known in groups
            for name in group.parameters
            if not all(name in self._classes[kind].tensors for kind in known)
        }
        self.groups = split([group for group, _ in groups], factors)
        self.steps = {
            name: 0.0 if name in self.reset else state.steps[self._origins[name]]
            for group, _ in groups
            for name in group.parameters
            if self._origins.get(name) in state.steps or (name in self.reset and state.steps)
        }
        self.tensors = {
            f"{name}.{kind}": self._info(name, kind)
            for group, known in groups
            for name in group.parameters
            for kind in sorted(known)
        }
        self.tensors |= {f"{name}.{STEP}": TensorInfo((), "F32") for name in self.steps}

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor, as consecutive blocks along dimension 0."""
        import torch

        parameter, _, kind = name.rpartition(".")
        if kind == STEP or parameter in self.reset:
            yield from super().blocks(name)
        else:
            dtype = getattr(torch, TORCH_NAMES[self.tensors[name].dtype])
            weights, stored = self._made(parameter, kind)
            for block in weights.blocks(stored):
                yield block.to(dtype)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor."""
        import torch

        parameter, _, kind = name.rpartition(".")
        info = self.tensors[name]
        dtype = getattr(torch, TORCH_NAMES[info.dtype])
        if kind == STEP:
            return torch.tensor(self.steps[parameter])
        if parameter in self.reset:
            sizes = [each.stop - each.start for each in full(info.shape, where)]
            return torch.zeros(sizes, dtype=dtype)
        weights, stored = self._made(parameter, kind)
        return weights.read(stored, *where).to(dtype)

    def cuts(self, name: str) -> int:
        """As those of what it is made from."""
        parameter, _, kind = name.rpartition(".")
        if kind == STEP or parameter in self.reset:
            return ANYWHERE
        weights, stored = self._made(parameter, kind)
        return weights.cuts(stored)

    def _made(self, parameter: str, kind: str) -> tuple[Weights, str]:
        """What makes a parameter's moments, and what they are called there."""
        stored = self._classes[kind].stored_as(parameter)
        return (self._stages[kind], stored) if stored else (self._classes[kind], parameter)

    def _grown(self, kind: str) -> Weights:
        """All tensors of one kind, under the names of the target's files."""
        stage: Weights = OfKind(self._state, kind, self._before, self._lineage.source)
        for plan in self._lineage.plans:
            stage = _through(plan, stage, ORDERS[kind])
        return stage

    @cached_property
    def _origins(self) -> dict[str, str]:
        """For each parameter of the target the first of the source's that it is made from."""
        parameter = {
            tensor: name
            for each in self._before.conversions
            for name in each.shapes
            for tensor in each.sources
        }
        found: dict[str, str] = {}
        for each in self._after.conversions:
            named = [
                parameter[name]
                for target in each.sources
                if target in self._lineage.plans[-1].by_target
                for rule in self._lineage.steps(target)[-1]
                for name in rule.sources
                if parameter.get(name) in self._before.shapes
            ]
            found |= {name: named[0] for name in each.shapes if named}
        return found

    def _grouped(self) -> list[tuple[Group, frozenset[str]]]:
        """The target's parameters in the source's groups, and the kinds that these have.

        What was grown stays in its group. What is new joins those that decay as it does, and of
        these what has as many dimensions: some let matrices decay, and no vector.
        """
        number_of = {
            name: number
            for number, group in enumerate(self._state.groups)
            for name in group.parameters
        }
        alike: dict[object, int] = {}
        for name, number in number_of.items():
            for kind in _customs(self._before, name):
                alike.setdefault(kind, number)
        names: list[list[str]] = [[] for _ in self._state.groups]
        for name in self._after.shapes:
            origin = self._origins.get(name)
            if origin is not None and origin not in number_of:
                continue  # another optimizer has it
            own = (alike[kind] for kind in _customs(self._after, name) if kind in alike)
            names[next(own, 0) if origin is None else number_of[origin]].append(name)
        kinds = self._state.kinds
        return [
            (Group(tuple(names[number]), each.options), _kinds(each, kinds))
            for number, each in enumerate(self._state.groups)
        ]

    def _info(self, name: str, kind: str) -> TensorInfo:
        found = self._classes[kind].tensors.get(name)
        if found is not None:
            return found
        return TensorInfo(self._after.shapes[name], self._main_dtype(kind))

    def _main_dtype(self, kind: str) -> str:
        tensors = self._state.numbers.tensors
        found = (info.dtype for name, info in tensors.items() if name.endswith(f".{kind}"))
        return moments_dtype(next(found))

    def _why(self, name: str) -> str:
        """Why a parameter has no moments, in the words of the plan where it has some."""
        for each in self._after.conversions:
            for target in each.sources if name in each.shapes else ():
                for rules in self._lineage.steps(target):
                    for rule in rules:
                        if not rule.sources or rule.transform.moments(1) is None:
                            return rule.why
        return OF_COMPUTED


def _customs(parameters: Parameters, name: str) -> tuple[object, object]:
    """What decides on a parameter's group, the closest first."""
    decayed = name in parameters.decayed
    return (decayed, len(parameters.shapes[name]) > 1), decayed


def _kinds(group: Group, kinds: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Those that all parameters of a group have; they are alike, but for what was never needed."""
    of_each = [kinds[name] for name in group.parameters]
    return frozenset.intersection(*of_each) if of_each else frozenset()


def _made_of(parameters: Parameters, stage: Weights) -> tuple[Any, ...]:
    """The conversions of which all tensors have moments."""
    return tuple(
        each for each in parameters.conversions if all(n in stage.tensors for n in each.sources)
    )


def _through(plan: Plan, stage: Weights, order: int) -> Planned:
    """What a step makes of one kind of tensors: those whose sources have some."""
    rules = []
    for rule in plan.rules:
        how = rule.transform.moments(order)
        if how is None or not stage.tensors.keys() >= set(how.sources):
            continue
        if isinstance(how, Constant):
            continue  # what is new has gathered nothing, in no step
        dtype = stage.tensors[how.sources[0]].dtype if how.sources else "F32"
        rules.append(Rule(rule.target, replace(rule.info, dtype=dtype), how))
    return Planned(stage, replace(plan, rules=tuple(rules), duplicates={}))
