"""What a family's file says of its experts: how they are chosen, and what dense models become them.

A router gives every expert of a layer a number for every token, and the ``top_k`` experts with the
largest are computed. Each is weighed: with its part of a softmax over all experts, or over the
chosen ones, or with a sigmoid of its own number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from growkit.base.tensors import Config

EAGER_EXPERTS = 'experts_implementation="eager"'
"""How models load whose experts transformers' products of groups would refuse."""

NEW: tuple[str, ...] = ()
"""No tensor of a dense model: routers are new."""


def whatever(config: Config) -> bool:
    """Any model of a type."""
    return True


def never(config: Config) -> bool:
    """No model of a type."""
    return False


@dataclass(frozen=True)
class Dense:
    """Models without experts that can become models with experts.

    Attributes:
        assumed: what their class assumes for keys that a config leaves out, where the class with
            experts assumes something else.
        ignored: keys that only the class with experts reads, and what they must say.
        only: keys that only the dense class reads, and the values at which they change nothing.
        when: whether a model of this (completed) config has no experts.
    """

    assumed: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    when: Callable[[Config], bool] = whatever


@dataclass(frozen=True)
class Experts:
    """How the models of a family use their experts.

    Attributes:
        width: the axis of an expert's hidden units.
        top_k: the key of how many experts a token goes through.
        alone: whether router weights are left unnormalised, in a model of
            this (completed) config; else the weights of all experts, or of those that are chosen,
            sum to one.
        scaling: the key of what all weights are multiplied by.
        groups: keys of how many groups of neighbours experts form, and of how many a token may use.
        float32: whether routers compute in float32 whatever the dtype of a model.
        dense: the ``model_type``s of dense models that can become models with experts.
        config: what a config says so that every layer has experts, and the weights of those that
            are chosen sum to one.
        part: what of a dense MLP the chosen experts compute.
        beside: by what the last matrix is multiplied in those that compute the rest.
        sizes: of what computes the rest, from the width of the dense MLP and the number of experts
            that it is cut into.
    """

    width: str
    top_k: str = "num_experts_per_tok"
    alone: Callable[[Config], bool] = never
    scaling: str | None = None
    groups: tuple[str, ...] = ()
    float32: bool = False
    dense: Mapping[str, Dense] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    part: float = 1.0
    beside: float = 1.0
    sizes: Callable[[int, int], Mapping[str, int]] = lambda width, pieces: {}
