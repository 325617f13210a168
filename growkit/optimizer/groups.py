"""Parameter groups: which parameters an optimizer treats alike, and by what growing scales that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growkit.planning.factors import UNCHANGED, Factors

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""What optimizers and schedules call learning rates of a group."""


@dataclass(frozen=True)
class Group:
    """A group of an optimizer.

    Attributes:
        parameters: their names in the class, in order.
        options: everything else, e.g. ``lr`` and ``betas``.
        rate: by what its learning rates were scaled.
        origin: the number of the group that it was a part of.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    rate: float = 1.0
    origin: int = 0


def split(groups: Sequence[Group], factors: Mapping[str, Factors]) -> list[Group]:
    """Groups whose parameters have the same factors, with the options scaled by these.

    Every group is taken apart into one for each set of factors in it, in the order in which these
    come up; parameters keep their order. Without factors the groups stay as they are, but for those
    without parameters, which ``param_groups`` does not make and torch.distributed.checkpoint cannot
    load: Trainer has one where a model has neither norms with weights nor biases.

    Args:
        groups: those of the source's optimizer, with the parameters of the target.
        factors: of parameters, by name; others stay unchanged.
    """
    found = []
    for number, group in enumerate(groups):
        alike: dict[Factors, list[str]] = {}
        for name in group.parameters:
            alike.setdefault(factors.get(name, UNCHANGED), []).append(name)
        found += [
            Group(tuple(names), _scaled(group.options, each), each.lr, number)
            for each, names in alike.items()
        ]
    return found


def _scaled(options: Mapping[str, Any], factors: Factors) -> dict[str, Any]:
    by = {**dict.fromkeys(RATES, factors.lr), "weight_decay": factors.weight_decay}
    by["eps"] = factors.eps
    return {
        key: value * by[key] if key in by and isinstance(value, int | float) else value
        for key, value in options.items()
    }
