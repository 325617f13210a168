"""Model families: tensor names and axes as data, one file each.

A family's file defines ``FAMILY``; being in this package is what registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growkit.algebra.axes import Pattern
from growkit.checkpoint.tensors import Config, Weights
from growkit.errors import InputError
from growkit.families.added import added_family
from growkit.families.description import (
    COUNTED,
    DiffForm,
    Multiple,
    Norm,
    Tensor,
    component_of,
)
from growkit.families.experts import Experts
from growkit.names import nearest, perhaps
from growkit.registry import members

MOST_LAYERS = 10_000
"""Or experts of a layer."""

MOST_EXPERTS = 1 << 15
"""In all layers together: more than the largest models have."""

MOST_ROWS = 1 << 22
"""Of a tensor, or columns, but for those that stand for the vocabulary."""

MOST_SIZE = 1 << 24
"""Of any size in a config: a hundred times that of the largest models there are."""

KINDS = {bool: "true or false", int: "a whole number", list: "a list"}
"""What keys with such defaults must be."""

QUANTISED = ("quantization_config", "compression_config")
"""Keys of configs of models whose weights are no numbers by themselves."""

LISTS = frozenset({"layer_types", "mlp_layer_types"})
"""Keys that hold one entry for each layer in every class that has them."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Everything that growkit knows of a model family.

    Attributes:
        name: for messages and ``growkit inspect``.
        model_types: the ``model_type`` values of ``config.json`` that belong to it; the first is
            what growkit writes.
        axes: for every config key that is a size, the axes whose sizes add up to it, or a function
            of the config that says so. An axis that stands twice counts twice. Axes of unknown size
            that share a key have equal sizes, so keys of single axes come first.
        defaults: what the model class assumes for keys that the config leaves out, as values or as
            functions of the config.
        tensors: every tensor.
        other_forms: every tensor, as other files hold the same models; that some lack the prefix of
            the class is known of all.
        constants: axes whose size is the same in every model of the family.
        same: axes that always have the size of another one.
        may_be_zero: keys of sizes that may be 0.
        derived: keys of sizes that the class computes from others, whatever a config says of them.
        ratios: keys of whole numbers that are the size of one axis divided by that of another.
        aliases: for keys of sizes, the other name under which a config may have them.
        kinds: for axes that no option names, the one that they grow with: experts' widths ``ffn``.
        fixed: axes that cannot grow in a model of this (completed) config, and why, as it ends a
            sentence.
        per_layer: keys that hold one number for all layers, or a list with one for each; their
            axes are numbered, ``rank_0`` and so on (``rank_{layer}`` in patterns).
        lists: keys that hold a list with one entry for each layer, if there is anything at all.
        arranged: what else a config says of which layer is of which kind: the keys that change for
            a model whose layers come from these of a model of this (completed) config.
        numbered: the key because of which layers of a model of this (completed) config compute with
            their number; None if they do not.
        normed_sums: whether norms take the sum of what a layer adds and what it was given, so that
            no layer can leave that as it is, in models of this (completed) config.
        grouped: axes whose neighbours form groups by position (head i reads KV head ⌊i/r⌋), so
            that copies must stand side by side.
        served: for such axes those whose coordinates serve their groups: KV heads those of heads.
        places: for axes whose coordinates compute with their number: from the sizes of source and
            target, for every place in the target the coordinate of the source that computes the
            same there, or None.
        norms: those that have no weight; the others stand with their weight.
        multiples: sizes that the model class demands to be multiples of others.
        recomputed: endings of tensor names that old checkpoints hold and the class computes itself.
        duplicates: for tied models, names that may repeat a tensor, and that tensor.
        choices: the values that keys with a fixed set of values may have.
        check: raises InputError for what else a (completed) config may have wrong.
        architecture: the class that ``config.json`` names, for models that growkit makes.
        loads_with: what runs its folders, where that is not transformers as it is.
        form: in what way its models are DIFF Transformers; None if they are not.
        experts: how its models use experts; None if they have none.
        auto_map: where transformers finds the classes in the folder's own code.
        write_code: puts the model's code into a folder, for models that transformers lacks.
    """

    name: str
    model_types: tuple[str, ...]
    axes: Mapping[str, Axes | Callable[[Config], Axes]]
    tensors: tuple[Tensor, ...]
    other_forms: tuple[tuple[Tensor, ...], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    may_be_zero: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Config], Mapping[str, str]] = lambda config: {}
    per_layer: frozenset[str] = frozenset()
    lists: frozenset[str] = LISTS
    arranged: Callable[[Config, Sequence[int]], Config] = lambda config, layers: {}
    numbered: Callable[[Config], str | None] = lambda config: None
    normed_sums: Callable[[Config], bool] = lambda config: False
    grouped: frozenset[str] = frozenset()
    served: Mapping[str, Axes] = field(default_factory=dict)
    places: Mapping[str, Callable[[int, int], Sequence[int | None]]] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    multiples: tuple[Multiple, ...] = ()
    recomputed: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Config], None] = lambda config: None
    architecture: str | None = None
    loads_with: str | None = None
    form: DiffForm | None = None
    experts: Experts | None = None
    auto_map: Mapping[str, str] | None = None
    write_code: Callable[[Path], None] | None = None

    def complete(self, config: Config) -> Config:
        """The config with the defaults filled in.

        Raises:
            InputError: a size is missing, is no positive number, or breaks a demand of the class.
        """
        complete = self._filled_in(config)
        sizes = self._solve(complete)
        for key, values in self.choices.items():
            if complete[key] not in values:
                raise InputError(
                    f"config.json of a {self.name} model has {key} {complete[key]!r}; choose one "
                    f"of {', '.join(values)}"
                )
        for key, default in self.defaults.items():
            kind = type(default)
            if kind in KINDS and type(complete[key]) is not kind:
                raise InputError(
                    f"config.json of a {self.name} model has {key} {complete[key]!r}; "
                    f"{KINDS[kind]} was expected"
                )
        self.check(complete)
        numbers = complete | sizes
        for demand in self.multiples:
            if numbers[demand.what] % max(numbers[demand.of], 1):
                raise InputError(
                    f"{demand.what} {numbers[demand.what]} is no multiple of {demand.of} "
                    f"{numbers[demand.of]}, but a {self.name} model needs that, {demand.why}; "
                    "choose other sizes"
                )
        return complete

    def _filled_in(self, config: Config) -> dict[str, Any]:
        """The config with other names, defaults and what the class computes."""
        needed = [key for key, entry in self.axes.items() if not callable(entry)]
        complete = {**dict.fromkeys(needed), **config}  # one that is missing is reported later
        for key, other in self.aliases.items():
            if complete.get(key) is None and other in config:
                complete[key] = config[other]
        for key, default in self.defaults.items():
            if complete.get(key) is None or key in self.derived:
                if not callable(default):
                    complete[key] = default
                    continue
                texts = dict.fromkeys(k for k in self.size_keys if isinstance(complete.get(k), str))
                try:
                    complete[key] = default(complete | texts)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                    complete[key] = None  # a size it depends on is bad, and is reported later
        return complete

    def check_bounds(self, config: Config, where: str) -> None:
        """Refuse sizes beyond all models before anything is made that grows with them.

        Raises:
            InputError: names the key.
        """
        counted = 1
        for key in self.axes:
            many = self.axes[key] in (("layers",), ("experts",))
            most = MOST_LAYERS if many else MOST_SIZE
            value = config.get(key, config.get(self.aliases.get(key, key)))
            largest = max((v for v in _listed(value) if isinstance(v, int)), default=0)
            if largest > most:
                raise InputError(
                    f"{key} is {largest} in config.json of {where}; at most {most:,} was "
                    "expected, correct it"
                )
            counted *= largest if many else 1
        if counted > MOST_EXPERTS:
            raise InputError(
                f"config.json of {where} promises {counted:,} experts in all layers; at most "
                f"{MOST_EXPERTS:,} was expected, correct it"
            )

    def sizes(self, config: Config) -> dict[str, int]:
        """The size of every axis."""
        return self._solve(self.complete(config))

    @property
    def size_keys(self) -> set[str]:
        """Every config key that says a size."""
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
            if not isinstance(value, int) or not _is_size(value, least):
                others = complete.keys() - self.size_keys - self.defaults.keys()
                meant = nearest(key, others) if value is None else None
                raise InputError(
                    f"config.json of a {self.name} model needs {key} as a positive whole number, "
                    f"but has {value!r}" + (f"; is {meant!r} to be {key!r}?" if meant else "")
                )
            unknown = [axis for axis in axes if axis not in sizes]
            rest = value - sum(sizes[axis] for axis in axes if axis in sizes)
            if unknown and rest % len(unknown):
                raise InputError(
                    f"{key} is {value}, but a {self.name} model needs a multiple of {len(unknown)}"
                )
            if rest < least * len(unknown) or (not unknown and rest):
                raise InputError(
                    f"{key} is {value} in config.json, which leaves nothing for "
                    f"{' and '.join(unknown) or 'the rest'}; correct it or the other sizes"
                )
            sizes |= {axis: rest // len(unknown) for axis in unknown}
            sizes |= {axis: sizes[of] for axis, of in self.same.items() if of in sizes}
        return sizes

    def _solve_per_layer(self, key: str, axes: Axes, value: Any, layers: int) -> dict[str, int]:
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(_is_size(each, 1) for each in values):
            raise InputError(
                f"config.json of a {self.name} model needs {key} as a positive whole number, or a "
                f"list of {layers} of them, one per layer, but has {value!r}"
            )
        return {f"{axis}_{layer}": size for axis in axes for layer, size in enumerate(values)}

    def expresses(self, config: Config, sizes: Mapping[str, int]) -> bool:
        """Whether the model class can have these sizes, whatever they cost."""
        try:
            found = self.sizes(self._with_sizes(config, sizes))
        except InputError:  # of config keys that contradict one another
            return False
        return all(found[axis] == size for axis, size in sizes.items())

    def resized(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config of a model whose axes have these sizes; all other keys stay as they are.

        Raises:
            InputError: the model class cannot express these sizes.
        """
        resized = self._with_sizes(config, sizes)
        found = self.sizes(resized)
        for name, pattern in self.patterns(resized).items():
            for dimension in pattern.dimensions:
                if "vocab" not in dimension.axes and dimension.size(found) > MOST_ROWS:
                    raise InputError(
                        f"{name} would have {dimension.size(found):,} rows or columns; "
                        f"at most {MOST_ROWS:,} can be made, choose smaller sizes"
                    )
        for axis, size in sizes.items():
            if found[axis] != size:
                listed = ", ".join(f"{each} {sizes[each]}" for each in sorted(sizes))
                computed = "".join(
                    f", since its class computes {axis} from the others"
                    for key in self.derived
                    if self.axes.get(key) == (axis,)
                )
                raise InputError(
                    f"a {self.name} model cannot have {axis} {size} with these sizes: "
                    f"{listed}{computed}; grow alike what it keeps alike"
                )
        return resized

    def _with_sizes(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config with every key that says a size."""
        resized = dict(config)
        complete = self.complete(config)
        for key, axes in self.axes_of(complete).items():
            # No method grows what differs between layers.
            if key in self.per_layer or (key in self.derived and key not in config):
                continue
            value = sum(sizes[axis] for axis in axes)
            # A default may depend on other sizes (head_dim on hidden_size): it is written out.
            if (
                config.get(key) is not None
                or value != complete[key]
                or callable(self.defaults.get(key))
            ):
                other = self.aliases.get(key, key)
                resized[other if config.get(key) is None and other in config else key] = value
        for key, (axis, of) in self.ratios.items():
            if sizes[axis] % sizes[of] == 0:
                resized[key] = sizes[axis] // sizes[of]
        return resized

    def named(self, config: Config) -> Config:
        """The config with the class that is to load it, for folders that growkit writes."""
        named = dict(config)
        if self.architecture and config.get("model_type") == self.model_types[0]:
            named["architectures"] = [self.architecture]
        if self.auto_map:
            named["auto_map"] = dict(self.auto_map)
        return named

    def patterns(self, config: Config) -> dict[str, Pattern]:
        """Name and pattern of every tensor of the model, in the order of the layers."""
        return {name: Pattern.parse(tensor.pattern) for name, tensor, _ in self.members(config)}

    def as_stored(self, config: Config, names: Collection[str]) -> Family:
        """The family with the form of its tensors that fits these names best."""
        forms = [replace(self, tensors=each) for each in (self.tensors, *self.other_forms)]
        forms += [base for form in forms if (base := form._of_base_class(names))]
        if len(forms) == 1:
            return self
        return max(forms, key=lambda form: sum(name in names for name in form.patterns(config)))

    def _of_base_class(self, names: Collection[str]) -> Family | None:
        """The family as its class without a head has it: without the prefix of the one with it.

        None if these names have the prefix.
        """
        prefix = self.tensors[0].name.partition(".")[0] + "."
        if any(name.startswith(prefix) for name in names):
            return None
        tensors = [
            replace(
                each,
                name=each.name.removeprefix(prefix),
                canonical=each.canonical or each.name,
                component=component_of(each),
            )
            for each in self.tensors
        ]
        pairs = self.duplicates.items()
        duplicates = {name: of.removeprefix(prefix) for name, of in pairs}
        return replace(self, tensors=tuple(tensors), duplicates=duplicates)

    def members(self, config: Config) -> list[tuple[str, Tensor, int | None]]:
        """Name, description and layer (None outside of the layers) of every tensor of a model."""
        complete = self.complete(config)
        sizes = self._solve(complete)
        found = []
        for tensor in self.tensors:
            if not tensor.when(complete):
                continue
            for layer in range(sizes["layers"]) if "{layer}" in tensor.name else (None,):
                if layer is not None and not tensor.layers(complete, layer):
                    continue
                pattern = tensor.pattern.format(layer=layer)
                described = (
                    tensor if pattern == tensor.pattern else replace(tensor, pattern=pattern)
                )
                axis = tensor.counts
                for number in range(sizes[axis]) if axis else (None,):
                    numbers = dict.fromkeys(COUNTED, number)
                    found.append((tensor.name.format(layer=layer, **numbers), described, layer))
        return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_size(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def families() -> dict[str, Family]:
    """All families, by the name of their file, and last the one that somebody added."""
    found = members("growkit.families", "FAMILY")
    known = {name: family for name, family in found.items() if isinstance(family, Family)}
    added = added_family()
    return known | {f"{added.name}, as described": added} if added else known


def family_of(config: Config, where: str) -> Family:
    """The family of a config.

    Raises:
        InputError: no family knows this model_type (lists those that are known), or a size is
            beyond all models.
    """
    model_type = config.get("model_type")
    known = {kind: family for family in families().values() for kind in family.model_types}
    if any(config.get(key) is not None for key in QUANTISED):
        raise InputError(f"the model in {where} is quantised; dequantise it first")
    inner = config.get("text_config")
    if isinstance(inner, dict) and model_type not in known:
        raise InputError(
            f"{where} has model_type {model_type!r}, with a language model of model_type "
            f"{inner.get('model_type')!r} inside (text_config); growkit takes language models that "
            "stand alone, save that one as a folder of its own (docs/families.md says how)"
        )
    if not isinstance(model_type, str) or model_type not in known:
        raise InputError(
            f"{where} has model_type {model_type!r}, which no family describes; "
            f"known are {', '.join(sorted(known))}{perhaps(model_type, known)}; 'growkit inspect "
            "--infer' describes others"
        )
    known[model_type].check_bounds(config, where)
    return known[model_type]


def stored_family(weights: Weights) -> Family:
    """The family of a checkpoint, in the form that its tensors have.

    Raises:
        InputError: see ``family_of``.
    """
    family = family_of(weights.config, weights.where())
    return family.as_stored(weights.config, weights.tensors.keys())
