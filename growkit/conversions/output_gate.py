"""An output gate for attention, so that a trained model continues with it.

What the heads of a token attend to is multiplied by σ(W x) before ``o_proj``, where x is what the
token's queries are made of. W begins as zeros: σ(0) = ½ everywhere, and ``o_proj`` times 2 makes up
for it. W learns from the first step on, since its gradient is ¼ of what it multiplies.

Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708.

The class must do the rest as the source does. Of transformers' classes with such a gate, Qwen3.5
does so for Qwen3, where all layers are full attention: rows of the gate follow those of the queries
of each head. Its norms add 1 to their weights, which are stored less 1. That rounds where a weight
is small for its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from growkit.algebra.expansion import NOTHING
from growkit.algebra.law import Rows
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, Weights
from growkit.families.description import Member
from growkit.families.family import Family, families, stored_family
from growkit.growth.copying import PROMISE
from growkit.planning.operation import Change, Operation, Option
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Computed, Kept, Mapped, Slices, Transform, row_maps

SOURCE, TARGET = "qwen3", "qwen3_5_text"

WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
"""Keys that only the source's class reads."""


class OutputGate(Operation):
    """See the module."""

    name = "output-gate"
    paper = "https://arxiv.org/abs/2505.06708"

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``Operation``."""
        return (PROMISE,)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family = stored_family(source)
        if SOURCE not in family.model_types:
            raise InputError(
                f"no class with an output gate does the rest of what a {family.name} model does, "
                f"so {source.where()} cannot get one; a Qwen3 model can"
            )
        target = next(each for each in families().values() if TARGET in each.model_types)
        config = _config(source, family)
        sizes, rounds = family.sizes(source.config), options[PROMISE.name] == "bounded"
        width = sizes["head_dim"]
        order = tuple(
            row if part == 0 else NOTHING
            for head in range(sizes["heads"])
            for part in range(2)
            for row in range(head * width, (head + 1) * width)
        )
        plan = Plan.checked(
            source,
            target,
            config,
            {each.name: _made(source, each, order, rounds) for each in target.members(config)},
            unused=unused_tensors(source, family),
            apart="the output gate is new",
        )
        if rounds:
            return Change(
                [plan], "bounded", "one rounding of the weights of norms", by_rounding=True
            )
        return Change([plan])


def _config(source: Weights, family: Family) -> Config:
    """The config of the model with a gate.

    Raises:
        InputError: the source has windows, which the class lacks.
    """
    from growkit.engine.oracle import resolved

    complete = family.complete(source.config)
    layers = complete["num_hidden_layers"]
    if set(complete["layer_types"]) != {"full_attention"}:
        raise InputError(
            f"config.json in {source.where()} has layers with sliding windows, which the class "
            "with an output gate lacks; only a model without can get one"
        )
    rope = (resolved(source.config) or source.config)["rope_parameters"]
    dropped = {*WINDOWS, "rope_theta", "rope_scaling", "auto_map"}
    return {key: value for key, value in source.config.items() if key not in dropped} | {
        "model_type": TARGET,
        "layer_types": ["full_attention"] * layers,
        "rope_parameters": dict(rope) | {"partial_rotary_factor": 1.0},
        "num_key_value_heads": complete["num_key_value_heads"],
        "head_dim": complete["head_dim"],
    }


def _made(source: Weights, place: Member, order: tuple[int, ...], rounds: bool) -> Transform:
    """How a tensor is made.

    Args:
        source: the model.
        place: the tensor.
        order: for each row of queries and gates, that of the source's queries.
        rounds: whether the weights of norms may be rounded.
    """
    name = place.name
    if ".q_proj." in name:
        rows, *others = source.tensors[name].shape
        maps = partial(row_maps, (rows, *others), order)
        return Mapped(name, maps, "queries, and zeros for the gate")
    if name.endswith("o_proj.weight"):
        return Kept(name, 2.0, "× 2, because the gate is ½")
    if place.tensor.norm:
        why = "less 1, which its class adds"
        return Computed((name,), f"{why}, rounded", _less_one) if rounds else LessOne(name, why=why)
    return Kept(name)


def _less_one(weight: Tensor) -> Tensor:
    return (weight.double() - 1).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class LessOne(Kept):
    """A tensor less 1, exactly."""

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: it rounds.
        """
        weight = super().part(source, where)
        less = _less_one(weight)
        if not (less.double() + 1).equal(weight.double()):
            raise InputError(
                f"{self.source} in {source.where(self.source)} less 1, as the class with a gate "
                f"stores it, rounds in {weight.dtype}; pass a wider --dtype, or --promise bounded"
            )
        return less

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        less = super().undo(rows, of)
        return None if less is None else (less.double() + 1).to(less.dtype)


OPERATION = OutputGate()
