"""The optimizers' states of source and target: what their training begins with, if they have some.

The target's must be what grows from the source's, number by number, and so must the settings in its
groups. Where some are not, the training is told by how much they are off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.training import Beginning, Custom
from growkit.optimizer.groups import Group
from growkit.optimizer.optimizer import Optimizer, open_state, written_in
from growkit.optimizer.parameters import parameters_of
from growkit.optimizer.state import MUON, STEP, State
from growkit.planning.lineage import Lineage
from growkit.planning.updates import Law
from growkit.recipe.recipe import Recipe

SETTINGS = ("lr", "weight_decay", "eps")
"""What the law of updates scales."""


@dataclass(frozen=True)
class Places:
    """Where two optimizers' states lie.

    Attributes:
        source: that of the source; None if it is not known.
        target: that of the target; None if it has none.
    """

    source: Path | None
    target: Path | None

    @property
    def untried(self) -> str:
        """Why the target's state is not tried, as a sentence ends; empty if there is none."""
        if self.target is None or self.source:
            return ""
        return (
            f"; the optimizer's state in {self.target} was not tried, as that of the source is not "
            "in its folder: name it with --optimizer"
        )


NOWHERE = Places(None, None)


def places_of(
    before: Checkpoint, after: Checkpoint, recipe: Recipe | None, given: Path | None
) -> Places:
    """Find the states of two optimizers.

    Args:
        before: the source.
        after: the target.
        recipe: how the target was made, from its manifest, which is a stranger's word: a state is
            looked for in the source's folder and nowhere else.
        given: where the source's was said to lie.

    Raises:
        InputError: it was said where it lies, and the target has none.
    """
    target = written_in(after.folder)
    if given is not None:
        if target is None:
            raise InputError(
                f"{after.folder} holds no optimizer's state that could be compared with {given}; "
                "leave --optimizer out, or grow the model with it"
            )
        return Places(given, target)
    if target is None or recipe is None or recipe.optimizer is None:
        return NOWHERE
    inside = before.folder / Path(recipe.optimizer).name
    return Places(inside if inside.exists() else written_in(before.folder), target)


class States:
    """The state of a source's optimizer, and that of its target's.

    Args:
        places: where both lie.
        before: the source.
        after: the target.
        lineage: from one to the other.
        law: how the target is to be updated.

    Attributes:
        where: both, in words.
        unlike: what in the target's state does not grow from the source's; empty if all does.

    Raises:
        InputError: one of them cannot be read, or belongs to another model.
    """

    def __init__(
        self, places: Places, before: Checkpoint, after: Checkpoint, lineage: Lineage, law: Law
    ) -> None:
        assert places.source
        assert places.target
        optimizer = Optimizer(places.source, before, lineage)
        self._source, self._grown = optimizer.state, optimizer.grown(after, law)
        self._target = open_state(places.target, parameters_of(after))
        self.where = f"{self._source.where} and {self._target.where}"
        self.unlike = next(self._differences(), "")

    @property
    def trains(self) -> bool:
        """Whether AdamW goes on from them; Muon's momentum is nothing to it."""
        return MUON not in self._source.kinds.values()

    def source(self) -> Beginning:
        """What the source's training begins with."""
        return _beginning(self._source, self._source.steps, {})

    def target(self) -> Beginning:
        """What the target's begins with: with its settings as far off as they are in the file."""
        return _beginning(self._target, self._target.steps, _settings(self._grown.groups))

    def _differences(self) -> Iterator[str]:
        expected, found = _settings(self._grown.groups), _settings(self._target.groups)
        where = self._target.where
        for name in sorted({*expected, *found}):
            if name not in expected or name not in found:
                yield f"{name} is in {'no' if name in expected else 'a'} group of {where}"
                continue
            for key, value in expected[name].items():
                is_now = found[name].get(key)
                if is_now != value:
                    yield f"{key} of {name} in {where} is {is_now}, where {value} was expected"
        for name, step in self._target.steps.items():
            wanted = self._grown.steps.get(name, step)
            if step != wanted:
                yield f"the step of {name} in {where} is {step:g}, where {wanted:g} was expected"
        for name, info in self._grown.tensors.items():
            parameter, _, kind = name.rpartition(".")
            if kind != STEP and not self._same(name):
                yield f"{kind} of {parameter} in {where} ({list(info.shape)}) does not grow from it"

    def _same(self, name: str) -> bool:
        numbers = self._target.numbers
        if name not in numbers.tensors or numbers.tensors[name] != self._grown.tensors[name]:
            return False
        begin = 0
        for block in self._grown.blocks(name):
            end = begin + (block.shape[0] if block.dim() else 1)
            there = numbers.read(name, slice(begin, end) if block.dim() else None)
            if not torch.equal(block, there):
                return False
            begin = end
        return True


def _settings(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """The options of every parameter."""
    return {name: dict(group.options) for group in groups for name in group.parameters}


def _beginning(
    state: State, steps: Mapping[str, float], expected: Mapping[str, Mapping[str, Any]]
) -> Beginning:
    """A state in memory.

    Args:
        state: of an optimizer.
        steps: that every parameter has taken.
        expected: what the settings of a parameter should be, if they may be off.
    """
    moments: dict[str, dict[str, Any]] = {}
    for key in state.numbers.tensors:
        name, _, kind = key.rpartition(".")
        moments.setdefault(name, {})[kind] = state.numbers.read(key, None).double()
    customs = {
        name: Custom(
            betas=(float(options["betas"][0]), float(options["betas"][1])),
            amsgrad="max_exp_avg_sq" in moments[name],
            **{key: _off(options.get(key), expected.get(name, {}).get(key)) for key in SETTINGS},
        )
        for name, options in _settings(state.groups).items()
    }
    return Beginning(moments, dict(steps), customs)


def _off(found: Any, expected: Any) -> float:
    """How many times what it should be a setting is."""
    numbers = all(isinstance(each, int | float) and each > 0 for each in (found, expected))
    off = found / expected if numbers else 1.0
    return off if math.isfinite(off) else 1.0
