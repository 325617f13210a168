"""Parts of a family: tensors, norms, experts, and how its models are DIFF Transformers.

At the end, the vocabulary of family descriptions: every key and the kind of its value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from growkit.algebra.axes import Order, Pattern, Role
from growkit.base.parsing import ANY
from growkit.base.tensors import Config

When = Callable[[Config], bool]
"""A condition on a (completed) config."""

InLayer = Callable[[Config, int], bool]
"""A condition on a layer of a model of a (completed) config."""


def always(config: Config) -> bool:
    """Every model of the family."""
    return True


def every_layer(config: Config, layer: int) -> bool:
    """Every layer of a model."""
    return True


LISTS = frozenset({"layer_types", "mlp_layer_types"})
"""Keys that hold one entry for each layer in every class that has them."""

COUNTED = {"expert": "experts", "head": "heads", "kv_head": "kv_heads"}
"""Placeholders in tensor names besides ``{layer}``, and the axes that they count."""

NEW: tuple[str, ...] = ()
"""``Tensor.dense`` of routers: no tensor of a dense model becomes this one."""

EAGER_EXPERTS = 'experts_implementation="eager"'
"""Load option for models whose experts transformers' grouped products would refuse."""


@dataclass(frozen=True)
class Norm:
    """A norm: its input, divided by the root mean square of the coordinates.

    Attributes:
        over: the axis of the mean.
        eps: the config key of the number added to the mean; None if the class fixes it.
        centred: whether the mean of the coordinates is subtracted first (LayerNorm).
        behind: whether it follows attention or MLP, and its output is added to the hidden states.
    """

    over: str
    eps: str | None
    centred: bool = False
    behind: bool = False


@dataclass(frozen=True)
class Tensor:
    """One tensor of a family, repeated for each layer and expert if its name counts them.

    Attributes:
        name: as in the checkpoint, e.g. ``model.layers.{layer}.mlp.up_proj.weight``, with the
            placeholders ``{layer}`` and those of ``COUNTED``.
        pattern: the axes that it reads and writes, in the notation of ``growkit.algebra.axes``.
        when: the models that have the tensor.
        canonical: for DIFF Transformers, its name in ``growkit.modeling``, if that differs.
        order: the storage order of its rows, if it differs from the pattern.
        layers: the layers that have the tensor.
        norm: the norm, for the weight of one.
        scale: the factor that the class applies to the tensor, from the sizes of the axes.
        offset: the number that the class adds to the tensor before it applies the factor.
        component: its part of the model, for users who search for a fault; None to derive it from
            the name (``component_of``).
        dense: for families with experts, the dense model's tensors that become this one, stacked
            in this order, or ``NEW``; None for the tensor of the same name.
    """

    name: str
    pattern: str
    when: When = always
    canonical: str | None = None
    order: Order | None = None
    layers: InLayer = every_layer
    norm: Norm | None = None
    scale: Callable[[Mapping[str, int]], float] | None = None
    offset: float = 0.0
    component: str | None = None
    dense: tuple[str, ...] | None = None

    @property
    def counts(self) -> str | None:
        """The axis that the name counts; None for a single tensor."""
        return next((axis for key, axis in COUNTED.items() if f"{{{key}}}" in self.name), None)


class Member(NamedTuple):
    """A tensor of a model.

    Attributes:
        name: of the tensor.
        tensor: its description, with the pattern that it has in its layer.
        layer: of the tensor; None outside of the layers.
        number: which one of those that its name counts (``Tensor.counts``); None for a single one.
    """

    name: str
    tensor: Tensor
    layer: int | None
    number: int | None

    @property
    def pattern(self) -> Pattern:
        """What the tensor reads and writes."""
        return Pattern.parse(self.tensor.pattern)


def component_of(tensor: Tensor) -> str:
    """The part of a model that a tensor belongs to.

    In a layer: a norm, a projection of the attention, ``attention`` for its other parameters, or a
    whole MLP. Outside of the layers: ``embedding``, ``norm`` or ``lm_head``.
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
    """A requirement of the model class: one number is a multiple of another.

    Attributes:
        what: a config key or an axis.
        of: another.
        why: the reason, as the end of a sentence.
    """

    what: str
    of: str
    why: str


@dataclass(frozen=True)
class DiffForm:
    """How the models of a family are read as DIFF Transformers (``growkit.modeling``).

    Attributes:
        switches: values in the DIFF Transformer's config for all keys that the family fixes.
        keys: the family's names of keys, by their names in the DIFF Transformer's config.
        lambda_init: λ_init of a layer, counted from 0, as the class computes it; None if the
            config lists it or the class has none.
        harmless: keys that no DIFF Transformer has, and the values that change nothing.
        assumed: defaults of the class for these keys, if they change something.
        strict: whether unknown keys are refused; False for configs full of training settings.
    """

    switches: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    lambda_init: Callable[[int], float] | None = None
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True


@dataclass(frozen=True)
class Dense:
    """Models without experts that can become models with experts.

    Attributes:
        assumed: defaults of their class that differ from those of the class with experts.
        ignored: keys that only the class with experts reads, and the values that they must have.
        only: keys that only the dense class reads, and the values that change nothing.
        when: the models that have no experts.
    """

    assumed: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    when: When = always


@dataclass(frozen=True)
class Experts:
    """How the models of a family use their experts.

    A router gives every expert a number for each token, and the ``top_k`` experts with the largest
    are computed. The weight of an expert is its part of a softmax over all experts, or over the
    chosen ones, or a sigmoid of its number.

    Attributes:
        width: the axis of an expert's hidden units.
        top_k: the key of the number of experts per token.
        alone: the models that leave router weights unnormalised; otherwise the weights of all
            experts, or of the chosen ones, sum to one.
        scaling: the key of a factor of all weights.
        groups: keys of the number of expert groups, and of the groups that a token may use.
        float32: whether routers compute in float32 in every dtype.
        dense: dense models that can become models with experts, by ``model_type``.
        config: keys of a config with experts in every layer, whose chosen weights sum to one.
        part: the part of a dense MLP that the chosen experts compute.
        beside: the factor of the last matrix of the shared experts, which compute the rest.
        sizes: sizes of the shared experts, from the width of the dense MLP and the number of
            pieces that it is cut into.
    """

    width: str
    top_k: str = "num_experts_per_tok"
    alone: When = lambda config: False
    scaling: str | None = None
    groups: tuple[str, ...] = ()
    float32: bool = False
    dense: Mapping[str, Dense] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    part: float = 1.0
    beside: float = 1.0
    sizes: Callable[[int, int], Mapping[str, int]] = lambda width, pieces: {}

    @property
    def keys(self) -> set[str]:
        """The keys of the number of experts per token and of their weights."""
        return {self.top_k, *self.groups, *([self.scaling] if self.scaling else [])}


TEXTS = {ANY: str}
CONDITION = (bool, str)

NORM = {"norm": str, "eps": str, "centred": bool, "behind": bool}

TENSOR = NORM | {
    "pattern": str,
    "tied": str,
    "bias": CONDITION,
    "when": CONDITION,
    "offset": float,
    "root": str,
    "order": [str],
    "component": str,
    "dense": ([str], str),
    "canonical": str,
}
"""What a tensor may say.

``tied`` is its pattern in tied models; ``bias`` the models with a bias next to a weight; ``root``
an axis whose root its class multiplies it by; ``order`` one of ``ORDERS`` and its axes.
"""

MULTIPLE = {"of": str, "why": str}

FORM = {
    "switches": dict,
    "keys": TEXTS,
    "lambda_init": str,
    "harmless": {ANY: list},
    "assumed": dict,
    "strict": bool,
}

EXPERTS = {
    "width": str,
    "top_k": str,
    "alone": CONDITION,
    "scaling": str,
    "groups": [str],
    "float32": bool,
    "dense": {
        ANY: {"assumed": dict, "ignored": dict, "only": {ANY: list}, "when": CONDITION},
    },
    "config": dict,
    "part": float,
    "beside": float,
    "sizes": TEXTS,
}

KEYS = {
    "family": str,
    "model_type": ([str], str),
    "extends": str,
    "architecture": str,
    "loads_with": str,
    "sizes": {ANY: ({ANY: CONDITION}, str)},
    "same": TEXTS,
    "constants": {ANY: range(1, 1 << 24)},
    "assumed": dict,
    "conditions": TEXTS,
    "computed": [str],
    "may_be_zero": [str],
    "ratios": TEXTS,
    "aliases": TEXTS,
    "former": TEXTS,
    "per_layer": [str],
    "choices": {ANY: [str]},
    "groups": {ANY: ([str], str)},
    "kinds": TEXTS,
    "places": TEXTS,
    "multiples": {ANY: ([MULTIPLE], MULTIPLE, str)},
    "needs": TEXTS,
    "lists": [str],
    "arranged": dict,
    "numbered": str,
    "normed_sums": CONDITION,
    "fixed": {ANY: ({"when": CONDITION, "why": str}, str)},
    "norms": [NORM],
    "recomputed": [str],
    "tied": TEXTS,
    "tensors": {ANY: ([TENSOR], TENSOR, str)},
    "other_forms": [dict],
    "form": FORM,
    "experts": EXPERTS,
}
"""The keys of a description and the kinds of their values (``growkit.base.parsing.check_kind``)."""
