"""Parts of a family: tensors, norms, experts, sizes, how its models are DIFF Transformers.

At the end, the vocabulary of family descriptions: every key and the kind of its value.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeGuard

from growkit.base.axes import Dimension, Order, Pattern, Role
from growkit.base.errors import InputError
from growkit.base.names import nearest
from growkit.base.parsing import ANY, check_kind
from growkit.base.tensors import Config
from growkit.model.families.expressions import LAYER, Expression

When = Callable[[Config], bool]
"""A condition on a (completed) config."""

LISTS = frozenset({"layer_types", "mlp_layer_types"})
"""Keys that hold one entry for each layer in every class that has them."""

COUNTED = {"expert": "experts", "head": "heads", "kv_head": "kv_heads"}
"""Placeholders in tensor names besides ``{layer}``, and the axes that they count."""

PREDICTING = re.compile(r"num_nextn_predict_layers|num_mtp_\w+|mtp_num_\w+")
"""Names of keys for the number of layers that predict further tokens."""

BALANCING = re.compile(r"(router_)?aux_loss_coef|moe_loss_weight")
"""Names of keys for the coefficient of a loss that balances experts."""

NEW: tuple[str, ...] = ()
"""``Tensor.dense`` of routers: no tensor of a dense model becomes this one."""

MISSING: Any = object()
"""No value of a key."""

EAGER_EXPERTS = 'experts_implementation="eager"'
"""Load option for models whose experts transformers' grouped products would refuse."""


@dataclass(frozen=True)
class Norm:
    """A norm: its input, divided by the root mean square of the coordinates.

    Attributes:
        over: the axis of the mean.
        eps: the config key of the number added to the mean; None if the class fixes it.
        centred: whether the mean of the coordinates is subtracted first (LayerNorm).
    """

    over: str
    eps: str | None
    centred: bool = False


@dataclass(frozen=True)
class Tensor:
    """One tensor of a family, repeated for each layer and expert if its name counts them.

    Attributes:
        name: as in the checkpoint, e.g. ``model.layers.{layer}.mlp.up_proj.weight``, with the
            placeholders ``{layer}`` and those of ``COUNTED``.
        pattern: the axes that it reads and writes, in the notation of ``growkit.base.axes``.
        conditions: conditions on the models, and on their layers, that have the tensor.
        canonical: for DIFF Transformers, its name in their own class, if that differs.
        order: the storage order of its rows, if it differs from the pattern.
        norm: the norm, for the weight of one.
        scale: the factor that the class applies to the tensor, from the sizes of the axes.
        idle: its value in a layer that returns its input, as the class has it; None if that does
            not matter.
        diagonal: its value there on the diagonal, if that differs.
        start: its value where it is new, as the class has it, or one of ``STARTS``; None for
            zeros in vectors, ones in norms, and random numbers in matrices.
        offset: the number that the class adds to the tensor before it applies the factor.
        indices: whether it holds whole numbers, such as the experts of every token.
        component: its part of the model, for users who search for a fault; None to derive it from
            the name (``component_of``).
        dense: for families with experts, the dense model's tensors that become this one, stacked
            in this order, or ``NEW``; None for the tensor of the same name.
    """

    name: str
    pattern: str
    conditions: tuple[Expression, ...] = ()
    canonical: str | None = None
    order: Order | None = None
    norm: Norm | None = None
    scale: Callable[[Mapping[str, int]], float] | None = None
    idle: float | None = None
    diagonal: float | None = None
    start: float | str | None = None
    offset: float = 0.0
    indices: bool = False
    component: str | None = None
    dense: tuple[str, ...] | None = None

    def when(self, config: Config) -> bool:
        """Whether a model of a (completed) config has the tensor, in some layers or as a whole."""
        return all(one.holds(config) for one in self.conditions if LAYER not in one.names)

    def in_layer(self, config: Config, layer: int) -> bool:
        """Whether a layer of such a model has it."""
        return all(one.holds(config, layer) for one in self.conditions if LAYER in one.names)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What it reads and writes; sizes of single layers have one axis."""
        return Pattern.parse(self.pattern.replace("_{layer}", "")).dimensions

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

    @property
    def canonical(self) -> str:
        """The tensor's name in the canonical layout (``Tensor.canonical``)."""
        if self.tensor.canonical is None:
            return self.name
        numbers = dict.fromkeys(COUNTED, self.number)
        return self.tensor.canonical.format(layer=self.layer, **numbers)


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
    """How the models of a family are read as DIFF Transformers.

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
class Without:
    """Models without something, such as experts, that can become models of a class with it.

    Attributes:
        assumed: defaults of their class that differ from those of the class with it.
        ignored: keys that only the class with it reads, and the values that they must have.
        only: keys that only the class without it reads, and the values that change nothing, of
            which the first is the default of that class unless ``assumed`` has another.
        when: the models that do not have it.
    """

    assumed: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    when: When = lambda config: True


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
        balancing: the key of the coefficient of a loss that balances experts, which is proportional
            to ``top_k`` (arXiv 2101.03961, equations 4 to 6, as transformers computes it).
        divided: whether corrections are added to a softmax over all experts, in which every copy
            has a part.
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
    balancing: str = "router_aux_loss_coef"
    divided: bool = False
    groups: tuple[str, ...] = ()
    float32: bool = False
    dense: Mapping[str, Without] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    part: float = 1.0
    beside: float = 1.0
    sizes: Callable[[int, int], Mapping[str, int]] = lambda width, pieces: {}

    @property
    def keys(self) -> set[str]:
        """The keys of the number of experts per token and of their weights."""
        return {self.top_k, *self.groups, *([self.scaling] if self.scaling else [])}


MAX_LAYERS = 10_000
"""Limit for the number of layers, and of experts in a layer."""

MAX_EXPERTS = 1 << 15
"""Limit for the experts of all layers together: more than the largest models have."""

MAX_SIZE = 1 << 24
"""Limit for any size in a config: a hundred times that of the largest existing models."""

Axes = tuple[str, ...]


def one_model(name: str) -> str:
    """A model of a family, in messages."""
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name} model"


class MultipleError(InputError):
    """A size is not a multiple of another, although the model class requires it.

    Attributes:
        problem: the sentence without its remedy.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class HasSizes:
    """The configs of a model family.

    Attributes:
        name: for messages and ``growkit inspect``.
        axes: for every config key that is a size, the axes whose sizes add up to it, or a function
            from the config to these axes. An axis that is listed twice is added twice. Axes of
            unknown size that share a key have equal sizes, so keys of single axes come first.
        defaults: the model class's defaults for keys that the config leaves out, as values or as
            functions of the config.
        constants: axes whose size is the same in every model of the family.
        same: axes that always have the size of another one.
        may_be_zero: keys of sizes that may be 0.
        derived: keys, such as those of sizes, that the class computes from others and ignores in a
            config.
        ratios: keys of whole numbers that are the product of some axes, divided by another one.
        aliases: for keys of sizes, the other name under which a config may have them.
        former: keys of older configs, and their names today, under which growkit writes them.
        per_layer: keys that hold one number for all layers, or a list with one for each; their
            axes are numbered, ``rank_0`` and so on (``rank_{layer}`` in patterns).
        multiples: sizes that must be multiples of another size.
        check: raises InputError for other errors in a (completed) config.
    """

    name: str
    axes: Mapping[str, Axes | Callable[[Config], Axes]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    may_be_zero: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()
    ratios: Mapping[str, tuple[Axes, str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    per_layer: frozenset[str] = frozenset()
    multiples: tuple[Multiple, ...] = ()
    check: Callable[[Config], None] = lambda config: None

    @property
    def one(self) -> str:
        """A model of the family, in messages."""
        return one_model(self.name)

    def complete(self, config: Config) -> Config:
        """The config with the defaults filled in.

        Raises:
            InputError: a size is missing, is not positive, or breaks a requirement of the class.
        """
        return self.solved(config)[0]

    def sizes(self, config: Config) -> dict[str, int]:
        """The size of every axis."""
        return self.solved(config)[1]

    def solved(self, config: Config) -> tuple[Config, dict[str, int]]:
        """The config with the defaults filled in, and the size of every axis; see ``complete``."""
        complete = self.filled_in(config)
        sizes = self._solve(complete)
        for key, default in self.defaults.items():
            if type(default) in (bool, int, float, list):
                what = f"{key} in config.json of {self.one}"
                check_kind(complete[key], type(default), what)
        self.check(complete)
        numbers = complete | sizes
        for demand in self.multiples:
            if not numbers.keys() >= {demand.what, demand.of}:  # axes of other models
                continue
            size, unit = numbers[demand.what], max(numbers[demand.of], 1)
            if size % unit:
                near = [
                    multiple
                    for multiple in (size - size % unit, size - size % unit + unit)
                    if multiple
                ]
                raise MultipleError(
                    f"{demand.what} {size} is no multiple of {demand.of} {unit}, but {self.one} "
                    f"needs that, {demand.why}",
                    f"choose {' or '.join(map(str, near))}, or another {demand.of}",
                )
        return complete, sizes

    def filled_in(self, config: Config) -> dict[str, Any]:
        """Fill in aliases, defaults and sizes that the class computes."""
        needed = [key for key, entry in self.axes.items() if not callable(entry)]
        # One that is missing is reported later.
        complete = {**dict.fromkeys(needed), **self.with_current_keys(config)}
        for key in (*self.axes, *self.ratios):
            if "." in key:
                complete[key] = value_at(config, key)
        for key, other in self.aliases.items():
            if complete.get(key) is None and other in config:
                complete[key] = config[other]
        for key, default in self.defaults.items():
            if complete.get(key) is None or key in self.derived:
                if not callable(default):
                    complete[key] = default
                    continue
                texts = dict.fromkeys(k for k in self.size_keys if isinstance(complete.get(k), str))
                stated = {k: v for k, v in complete.items() if v is not None or k in config}
                complete[key] = self.assumed(key, stated | texts)
        return complete

    def assumed(self, key: str, config: Config) -> Any:
        """The default of a key; None if a value that it depends on is bad, or there is none."""
        default = self.defaults.get(key)
        try:
            return default(config) if callable(default) else default
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None

    def with_current_keys(self, config: Config) -> Config:
        """The config with today's names of keys; where it has both, today's key decides."""
        current = {key: value for key, value in config.items() if key not in self.former}
        for former, key in self.former.items():
            if config.get(former) is not None and current.get(key) is None:
                current[key] = config[former]
        return current

    def check_bounds(self, config: Config, where: str) -> None:
        """Refuse sizes larger than in any model, before data that grows with them is made.

        Raises:
            InputError: names the key.
        """
        counted = 1
        for key in self.axes:
            many = self.axes[key] in (("layers",), ("experts",))
            limit = MAX_LAYERS if many else MAX_SIZE
            value = value_at(config, key)
            if value is None:
                value = config.get(self.aliases.get(key, key))
            largest = max((v for v in _listed(value) if isinstance(v, int)), default=0)
            if largest > limit:
                raise InputError(
                    f"{key} is {largest} in config.json of {where}; at most {limit:,} was "
                    "expected, correct it"
                )
            counted *= largest if many else 1
        if counted > MAX_EXPERTS:
            raise InputError(
                f"config.json of {where} promises {counted:,} experts in all layers; at most "
                f"{MAX_EXPERTS:,} was expected, correct it"
            )

    @property
    def size_keys(self) -> set[str]:
        """Every config key of a size."""
        return {*self.axes, *self.aliases.values(), *self.ratios}

    def axes_of(self, config: Config) -> dict[str, Axes]:
        """The axes behind every size in a completed config."""
        return {
            key: axes
            for key, entry in self.axes.items()
            if (axes := entry(config) if callable(entry) else entry)
        }

    def _solve(self, complete: Config) -> dict[str, int]:
        """The size of every axis, key by key."""
        sizes = dict(self.constants)
        for key, axes in self.axes_of(complete).items():
            value = complete.get(key)
            least = 0 if key in self.may_be_zero else 1
            if key in self.per_layer:
                sizes |= self._solve_per_layer(key, axes, value, sizes["layers"])
                continue
            if not _is_size(value, least):
                others = complete.keys() - self.size_keys - self.defaults.keys()
                meant = nearest(key, others) if value is None else None
                raise InputError(
                    f"config.json of {self.one} needs {key} as a positive whole number, "
                    f"but has {value!r}" + (f"; is {meant!r} to be {key!r}?" if meant else "")
                )
            unknown = [axis for axis in axes if axis not in sizes]
            rest = value - sum(sizes[axis] for axis in axes if axis in sizes)
            if unknown and rest % len(unknown):
                raise InputError(
                    f"{key} is {value}, but {self.one} needs a multiple of {len(unknown)}"
                )
            if rest < least * len(unknown) or (not unknown and rest):
                raise InputError(
                    f"{key} is {value} in config.json, which leaves nothing for "
                    f"{' and '.join(unknown) or 'the rest'}; correct it or the other sizes"
                )
            for axis in unknown:
                sizes[axis] = rest // len(unknown)
            for axis, of in self.same.items():
                if of in sizes:
                    sizes[axis] = sizes[of]
        return sizes

    def _solve_per_layer(self, key: str, axes: Axes, value: Any, layers: int) -> dict[str, int]:
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(_is_size(size, 1) for size in values):
            raise InputError(
                f"config.json of {self.one} needs {key} as a positive whole number, or a "
                f"list of {layers} of them, one per layer, but has {value!r}"
            )
        return {f"{axis}_{layer}": size for axis in axes for layer, size in enumerate(values)}

    def expresses(self, config: Config, sizes: Mapping[str, int]) -> bool:
        """Whether the model class can have these sizes."""
        try:
            by_axis = self.sizes(self._with_sizes(config, sizes))
        except InputError:  # of config keys that contradict one another
            return False
        return all(by_axis[axis] == size for axis, size in sizes.items())

    def _with_sizes(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config with every key of a size."""
        resized = config
        complete, before = self.solved(config)
        for key, axes in self.axes_of(complete).items():
            # No method grows sizes that differ between layers.
            if key in self.per_layer or (key in self.derived and key not in config):
                continue
            value, said = sum(sizes[axis] for axis in axes), value_at(config, key)
            # A default may depend on other sizes (head_dim on hidden_size): it is written out.
            if said is not None or value != complete[key] or callable(self.defaults.get(key)):
                other = self.aliases.get(key, key)
                resized = with_value(
                    resized, other if said is None and other in config else key, value
                )
        for key, (axes, of) in self.ratios.items():
            product = prod(sizes[axis] for axis in axes)
            quotient, rest = divmod(product, sizes[of])
            if not rest:
                resized = with_value(resized, key, quotient)
            elif any(sizes[axis] != before[axis] for axis in (*axes, of)):
                raise MultipleError(
                    f"{' times '.join(axes)} is {product}, which is no multiple of {of} "
                    f"{sizes[of]}, but {key} of {self.one} is their quotient",
                    f"choose another {of}",
                )
        return resized


def value_at(config: Config, key: str, default: Any = None) -> Any:
    """The value of a key, in which dots lead into parts of the config; a default if it has none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value


def with_value(config: Config, key: str, value: Any) -> dict[str, Any]:
    """The config with another value of a key (``value_at``), or without it for ``MISSING``."""
    first, _, rest = key.partition(".")
    if rest and (value is not MISSING or isinstance(config.get(first), Mapping)):
        value = with_value(config.get(first) or {}, rest, value)
    elif rest:
        return dict(config)
    changed = {**config, first: value}
    return {name: entry for name, entry in changed.items() if entry is not MISSING}


def without_keys(config: Config, keys: Container[str]) -> dict[str, Any]:
    """The config without some keys, in all of its parts."""
    return {
        key: without_keys(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }


def leaves(value: Config, path: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number in a config, with its key; a dot leads into a part."""
    for key, entry in value.items():
        if str(key).isdigit():  # a layer of its own
            continue
        if isinstance(entry, dict) and not key.startswith("rope"):
            yield from leaves(entry, f"{path}{key}.")
        elif isinstance(entry, int) and not isinstance(entry, bool):
            yield f"{path}{key}", entry


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_size(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


TEXTS = {ANY: str}
CONDITION = (bool, str)

NORM = {"norm": str, "eps": str, "centred": bool}

TENSOR = NORM | {
    "pattern": str,
    "tied": str,
    "bias": CONDITION,
    "when": CONDITION,
    "offset": float,
    "powers": {ANY: float},
    "idle": float,
    "diagonal": float,
    "start": (float, str),
    "indices": bool,
    "order": [str],
    "component": str,
    "dense": ([str], str),
    "canonical": str,
}
"""The keys of a tensor's entry and the kinds of their values.
``tied`` is its pattern in tied models; ``bias`` the models with a bias next to a weight;
``powers`` those of axes that its class multiplies it by;
``idle`` what it holds in a layer that changes nothing, and ``diagonal`` what its diagonal holds;
``start`` what it holds where it is new, or how that is drawn (``STARTS``); ``indices`` whether
these are whole numbers; ``order`` one of ``ORDERS`` and its axes.
"""

STARTS = ("decays", "small", "time_steps")
"""What ``growkit.extras.starts`` draws: logarithms of the rates at which states of heads decay,
matrices of small numbers, and biases of time steps."""

MULTIPLE = {"of": str, "why": str}

ARRANGED = {"layers": str, "count": str, "last": str}
"""How a key records the layers that meet a condition: their numbers, how many, or the last one."""

FORM = {
    "switches": dict,
    "keys": TEXTS,
    "lambda_init": str,
    "harmless": {ANY: list},
    "assumed": dict,
    "strict": bool,
}

WITHOUT = {ANY: {"assumed": dict, "ignored": dict, "only": {ANY: list}, "when": CONDITION}}

EXPERTS = {
    "width": str,
    "top_k": str,
    "alone": CONDITION,
    "scaling": str,
    "balancing": str,
    "groups": [str],
    "float32": bool,
    "divided": bool,
    "dense": WITHOUT,
    "config": dict,
    "part": float,
    "beside": float,
    "sizes": TEXTS,
}

KEYS = {
    "family": str,
    "model_type": ([str], str),
    "published_as": dict,
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
    "upgrades": {ANY: WITHOUT},
}
"""The keys of a description and the kinds of their values (``growkit.base.parsing.check_kind``)."""
