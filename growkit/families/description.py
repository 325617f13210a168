"""What a family's file says of its tensors, and of what its model class does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from growkit.algebra.axes import Order, Pattern, Role
from growkit.base.tensors import Config


def always(config: Config) -> bool:
    """Every model of the family has the tensor."""
    return True


def every_layer(config: Config, layer: int) -> bool:
    """Every layer has the tensor."""
    return True


COUNTED = {"expert": "experts", "head": "heads", "kv_head": "kv_heads"}
"""What names of tensors may count beside layers, and the axes."""


@dataclass(frozen=True)
class Norm:
    """A norm: what comes in, divided by the root of the mean square of its coordinates.

    Attributes:
        over: the axis whose coordinates the mean is taken of.
        eps: the config key of what is added to the mean; None for a number of the class.
        centred: whether the mean of the coordinates is taken away first (LayerNorm).
        behind: whether it stands behind attention or MLP, and what it writes is added to the hidden
            states, instead of what these write.
    """

    over: str
    eps: str | None
    centred: bool = False
    behind: bool = False


@dataclass(frozen=True)
class Tensor:
    """One tensor of a family, or one for each layer and expert that its name asks for.

    Attributes:
        name: as in the checkpoint, e.g. ``model.layers.{layer}.mlp.up_proj.weight``; there is one
            for each of an axis that it counts (``COUNTED``).
        pattern: what it reads and writes, in the notation of ``growkit.algebra.axes``.
        when: whether a model of this (completed) config has the tensor.
        canonical: for families that are DIFF Transformers, its name there, if it is another.
        order: how its rows are stored, if not in the order of the pattern.
        layers: whether a layer of a model of this (completed) config has the tensor.
        norm: what the class takes the mean over, for the weight of a norm.
        scale: by what the class multiplies the tensor, from the sizes of its axes.
        offset: what the class adds to the tensor, before it multiplies it.
        component: the part of a model that it belongs to, for people who look for a fault; None
            for the one that its name says (``component_of``).
        dense: for families with experts, the tensors of a dense model that become this one, one
            below the other (or ``growkit.families.experts.NEW``); None for the one of the same
            name.
    """

    name: str
    pattern: str
    when: Callable[[Config], bool] = always
    canonical: str | None = None
    order: Order | None = None
    layers: Callable[[Config, int], bool] = every_layer
    norm: Norm | None = None
    scale: Callable[[Mapping[str, int]], float] | None = None
    offset: float = 0.0
    component: str | None = None
    dense: tuple[str, ...] | None = None

    @property
    def counts(self) -> str | None:
        """The axis for each of which there is a tensor of its own; None for the usual one."""
        return next((axis for key, axis in COUNTED.items() if f"{{{key}}}" in self.name), None)


def component_of(tensor: Tensor) -> str:
    """The part of a model that a tensor belongs to.

    In a layer that is a module of its own: a norm, a projection of the attention, or a whole MLP.
    What an attention has beside its projections is ``attention``. Outside of the layers there are
    the ``embedding``, the ``norm`` and the ``lm_head``.
    """
    if tensor.component:
        return tensor.component
    _, in_layer, inside = (tensor.canonical or tensor.name).partition("{layer}.")
    if in_layer:
        block, _, rest = inside.partition(".")
        if not block.endswith(("attn", "attention")):
            return block
        module, inner, _ = rest.partition(".")
        return module if inner else "attention"
    pattern = Pattern.parse(tensor.pattern)
    if "vocab" in pattern.axes(Role.WRITTEN):
        return "lm_head"
    return "norm" if len(pattern.dimensions) == 1 else "embedding"


@dataclass(frozen=True)
class Multiple:
    """A demand of the family's model class: one number is a multiple of another.

    Attributes:
        what: a config key or an axis.
        of: another.
        why: the reason, as it ends a sentence.
    """

    what: str
    of: str
    why: str


@dataclass(frozen=True)
class DiffForm:
    """In what way the models of a family are DIFF Transformers, so that they can become one.

    Attributes:
        switches: what the config of each as a DIFF Transformer says (``growkit.modeling``), for
            all keys that the family cannot vary.
        keys: the family's own names of keys, by their name there.
        lambda_init: of a layer, counted from 0, as the family's class computes it; None where the
            config lists it, or there is none.
        harmless: keys of the family's own config that no DIFF Transformer has, and the values at
            which they change nothing.
        assumed: of these keys, what the family's class assumes where a config leaves them out, if
            that does change something.
        strict: whether keys that nobody named are refused; not where configs hold much that is of
            training alone.
    """

    switches: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    lambda_init: Callable[[int], float] | None = None
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True
