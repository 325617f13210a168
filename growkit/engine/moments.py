"""An optimizer's moments in memory: those of a source, as its target would have gathered them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import ANYWHERE, Config, TensorInfo, Weights, cut
from growkit.engine.class_weights import StoredGradients, converted
from growkit.engine.loader import loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout
from growkit.planning.plan import Plan

ORDERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""In which power gradients stand in the moments of AdamW."""

State = dict[str, dict[str, Tensor]]
"""The moments of every parameter, by their names in the class and in ``ORDERS``."""


class _InMemory(Weights):
    """Tensors that are read like those of a checkpoint."""

    def __init__(self, contents: Mapping[str, Tensor], config: Config) -> None:
        self.config = config
        self._contents = contents
        self.tensors = {n: TensorInfo(tuple(t.shape), "F64") for n, t in contents.items()}

    def where(self, name: str | None = None) -> str:
        return "the optimizer's state"

    def read(self, name: str, *where: slice | None) -> Tensor:
        return cut(self._contents[name], where)

    def cuts(self, name: str) -> int:
        return ANYWHERE


def grown_moments(
    state: State, before: Checkpoint, after: Checkpoint, plans: Sequence[Plan]
) -> State:
    """Moments of a source as moments of its target; zeros where none go through a transform.

    Args:
        state: of the source.
        before: the source.
        after: the target.
        plans: of all steps from one to the other.
    """
    if lacks_class(after.config):
        plans = (*plans, read_layout(after))
    found: State = {}
    for key, order in ORDERS.items():
        stored = StoredGradients(before)
        current = dict(
            each for name, moments in state.items() for each in stored(name, moments[key].cpu())
        )
        for plan in plans:
            current = _grown(plan, current, order)
        for name, tensor in _of_class(after, current).items():
            found.setdefault(name, {})[key] = tensor
    return found


def _grown(plan: Plan, current: Mapping[str, Tensor], order: int) -> dict[str, Tensor]:
    made = {}
    source = _InMemory(current, plan.config)
    for rule in plan.rules:
        moments = rule.transform.moments(order)
        if moments is None or not all(name in current for name in moments.sources):
            made[rule.target] = torch.zeros(rule.info.shape, dtype=torch.float64)
        else:
            weights: Weights = source
            where = [slice(0, size) for size in rule.info.shape]
            made[rule.target] = moments.part(weights, where).double()
    return made


def _of_class(after: Checkpoint, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names and in the shapes that the class has."""
    if lacks_class(after.config):
        return dict(stored)
    found: dict[str, Tensor] = {}
    for conversion in loading(after).conversions:
        if conversion.transform is None:
            found |= dict.fromkeys(conversion.shapes, stored[conversion.sources[0]])
            continue
        parts = {
            pattern: [stored[name] for name in names]
            for pattern, names in conversion.tensors.items()
        }
        with torch._C.DisableTorchFunction():
            found |= converted(conversion, parts)
    return found
