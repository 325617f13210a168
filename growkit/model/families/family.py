"""Model families: tensor names and axes as data.

Each YAML file of this package describes one family (``growkit.model.families.family_yaml``), and
so may the code of a class of growkit's own (``growkit.model.families.own_code``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from growkit.base.axes import Pattern, Role
from growkit.base.errors import InputError
from growkit.base.lazy import registered
from growkit.base.names import perhaps
from growkit.base.tensors import QUANTISED, Config
from growkit.model.families import family_parts
from growkit.model.families.family_parts import (
    DiffForm,
    Experts,
    Member,
    Norm,
    Tensor,
    Without,
    component_of,
)
from growkit.model.families.family_yaml import (
    read_description,
    read_shipped,
    shipped,
    shipped_text,
)
from growkit.model.families.own_code import auto_map_of, code_of

MAX_ROWS = 1 << 22
"""Limit for the rows or columns of a tensor, except for those of the vocabulary."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model that is made from another one.

    Attributes:
        of: index of the other model's layer that it copies.
        idle: whether its output is zero.
        entries: its entries in lists of the config, by their keys, where that layer has others.
    """

    of: int
    idle: bool = False
    entries: Mapping[str, Any] = field(default_factory=dict)

    @property
    def computes(self) -> int | None:
        """Index of the layer that it computes; None if it returns its input."""
        return None if self.idle else self.of

    def entry(self, key: str, entries: Sequence[Any]) -> Any:
        """Its entry in a list, from those of the other model."""
        return self.entries.get(key, entries[self.of])

    def after(self, layer: Layer) -> Layer:
        """The same layer, if the other model is made from a third one, and this is its layer."""
        return Layer(layer.of, self.idle or layer.idle, {**layer.entries, **self.entries})


@dataclass(frozen=True, kw_only=True)
class Family(family_parts.HasSizes):
    """A model family: its tensors, their axes, and how its class uses them.

    Attributes:
        model_types: the ``model_type`` values of ``config.json`` that belong to it; the first is
            what growkit writes.
        published_as: entries of ``config.json`` that belong to it as well, where another family has
            the same ``model_type``.
        tensors: every tensor.
        other_forms: every tensor, as other files store the same models. Files without the prefix of
            the class need no form of their own.
        kinds: for axes without an option, the axis that they grow with (experts' widths: ``ffn``).
        fixed: axes that cannot grow in a model of this (completed) config, and why, as it ends a
            sentence.
        lists: optional keys that hold a list with one entry for each layer.
        arranged: other keys that determine the kinds of layers: their values for a model that takes
            these layers from a model of this (completed) config.
        class_lists: the lists with one entry for each layer that the class makes of a config
            without lists; None if ``defaults`` describe them.
        numbered: the key that makes layers compute with their index in models of this (completed)
            config; None if none does.
        normed_sums: whether norms are applied to the sum of a layer's input and its contribution,
            so that no layer can be an identity, in models of this (completed) config.
        grouped: axes whose neighbours form groups by position (head i reads KV head ⌊i/r⌋), so
            that copies must be adjacent.
        served: for each grouped axis, the axes that serve its groups: ``kv_heads`` for ``heads``.
        places: for axes whose coordinates compute with their index: from the sizes of source and
            target, the source coordinate that computes the same at each index of the target, or
            None.
        norms: norms without a weight; a norm with a weight is described with it.
        recomputed: suffixes of tensors that old checkpoints store and the class recomputes.
        duplicates: for tied models, names that may repeat a tensor, and that tensor.
        architecture: the class in the ``config.json`` of models that growkit writes.
        loads_with: the software that runs its folders, if not plain transformers.
        form: how its models are DIFF Transformers; None if they are not.
        experts: how its models use experts; None if they have none.
        upgrades: by conversion to its classes, and by ``model_type``, the models of other classes
            that compute the same but for what the conversion changes.
        auto_map: where transformers finds the classes in the folder's own code.
        code: the files of code that belong next to its weights, by name, for models that
            transformers lacks.
        description: the description by a user, or the inferred one; None for the package's own.
        inferred: how the description was inferred, in a sentence; None if it was not.
    """

    model_types: tuple[str, ...]
    published_as: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...]
    other_forms: tuple[tuple[Tensor, ...], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Config], Mapping[str, str]] = lambda config: {}
    lists: frozenset[str] = family_parts.LISTS
    arranged: Callable[[Config, Sequence[int]], Config] = lambda config, layers: {}
    class_lists: Callable[[Config], Mapping[str, list[Any]]] | None = None
    numbered: Callable[[Config], str | None] = lambda config: None
    normed_sums: Callable[[Config], bool] = lambda config: False
    grouped: frozenset[str] = frozenset()
    served: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    places: Mapping[str, Callable[[int, int], Sequence[int | None]]] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    recomputed: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)
    architecture: str | None = None
    loads_with: str | None = None
    form: DiffForm | None = None
    experts: Experts | None = None
    upgrades: Mapping[str, Mapping[str, Without]] = field(default_factory=dict)
    auto_map: Mapping[str, str] | None = None
    code: Callable[[], Mapping[str, bytes]] = dict
    description: Mapping[str, Any] | None = None
    inferred: str | None = None

    def resized(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config of a model whose axes have these sizes; all other keys stay as they are.

        Raises:
            InputError: the model class cannot express these sizes.
        """
        resized = self._with_sizes(config, sizes)
        by_axis = self.sizes(resized)
        for name, pattern in self.patterns(resized).items():
            for dimension in pattern.dimensions:
                if "vocab" not in dimension.axes and dimension.size(by_axis) > MAX_ROWS:
                    raise InputError(
                        f"{name} would have {dimension.size(by_axis):,} rows or columns; "
                        f"at most {MAX_ROWS:,} can be made, choose smaller sizes"
                    )
        for axis, size in sizes.items():
            if by_axis.get(axis) != size:  # none, where sizes that become equal are one axis
                listed = ", ".join(f"{axis} {sizes[axis]}" for axis in sorted(sizes))
                computed = "".join(
                    f", since its class computes {axis} from other sizes"
                    for key in self.derived
                    if self.axes.get(key) == (axis,)
                )
                raise InputError(
                    f"{self.one} cannot have {axis} {size} with these sizes: "
                    f"{listed}{computed}; grow alike what it keeps alike"
                )
        return resized

    def named(self, config: Config) -> Config:
        """Add the class that loads the model to a config, for folders that growkit writes."""
        named = self.with_current_keys(config)
        if self.architecture and config.get("model_type") == self.model_types[0]:
            named["architectures"] = [self.architecture]
        if self.auto_map:
            named["auto_map"] = dict(self.auto_map)
        return named

    def patterns(self, config: Config) -> dict[str, Pattern]:
        """Name and pattern of every tensor of the model, in the order of the layers."""
        return {member.name: member.pattern for member in self.members(config)}

    @property
    def unseen_sizes(self) -> set[str]:
        """Keys of sizes that may not affect a prompt's logits: rows of tables, or no tensor's size.

        A prompt reads only as many rows of a position table as it has tokens. In contrast, another
        number of heads changes every logit.
        """
        shown, looked_up = {"layers"}, set[str]()
        for tensor in (tensor for form in (self.tensors, *self.other_forms) for tensor in form):
            axes = {axis for dimension in tensor.dimensions for axis in dimension.axes}
            if component_of(tensor) == "embedding" and tensor.dimensions[0].role is Role.READ:
                looked_up |= tensor.dimensions[0].axes
            shown |= axes | {tensor.counts or "layers"}
        return {
            key
            for key, axes in self.axes.items()
            if not callable(axes) and (looked_up & {*axes} or not shown & {*axes})
        }

    def as_stored(self, config: Config, names: Collection[str]) -> Family:
        """The family with the form of its tensors that fits these names best."""
        forms = [replace(self, tensors=tensors) for tensors in (self.tensors, *self.other_forms)]
        forms += [base for form in forms if (base := form._of_base_class(names))]
        if len(forms) == 1:
            return self
        return max(forms, key=lambda form: sum(name in names for name in form.patterns(config)))

    def _of_base_class(self, names: Collection[str]) -> Family | None:
        """The family of the class without a head, whose tensor names lack the prefix.

        None if these names have the prefix.
        """
        prefix = self.tensors[0].name.partition(".")[0] + "."
        if any(name.startswith(prefix) for name in names):
            return None
        tensors = [
            replace(
                tensor,
                name=tensor.name.removeprefix(prefix),
                canonical=tensor.canonical or tensor.name,
                component=component_of(tensor),
            )
            for tensor in self.tensors
        ]
        duplicates = {name: of.removeprefix(prefix) for name, of in self.duplicates.items()}
        return replace(self, tensors=tuple(tensors), duplicates=duplicates)

    def members(self, config: Config) -> list[Member]:
        """Every tensor of a model.

        Raises:
            InputError: a tensor has an axis for which this config has no size.
        """
        complete, sizes = self.solved(config)
        members = []
        for tensor in self.tensors:
            if not tensor.when(complete):
                continue
            axis = tensor.counts
            for layer in range(sizes["layers"]) if "{layer}" in tensor.name else (None,):
                if layer is not None and not tensor.in_layer(complete, layer):
                    continue
                pattern = tensor.pattern.format(layer=layer)
                described = (
                    tensor if pattern == tensor.pattern else replace(tensor, pattern=pattern)
                )
                axes = {axis for of in Pattern.parse(pattern).dimensions for axis in of.axes}
                unknown = axes.union([axis] if axis else []) - sizes.keys()
                if unknown:
                    raise InputError(
                        f"{tensor.name} of this {self.name} model has axis {min(unknown)}, for "
                        "which its config.json has no size"
                    )
                for number in range(sizes[axis]) if axis else (None,):
                    numbers = dict.fromkeys(family_parts.COUNTED, number)
                    name = tensor.name.format(layer=layer, **numbers)
                    members.append(Member(name, described, layer, number))
        return members

    @property
    def layers_key(self) -> str:
        """The key of the number of layers."""
        return next(key for key, axes in self.axes.items() if axes == ("layers",))


LAYER_KEYS = re.compile(
    r"(?!.*token).*(layer|block|pattern|types|attn|attention|idx|index|indices|rotary_factors"
    r"|(mlp|moe)_\w*(type|freq|ids))"
)
"""Names of keys that may describe layers one by one."""

OTHER_MODALITIES = re.compile(r"vision|visual|image|audio|speech|mm_")
"""Beginnings of names of keys that describe another part of a multimodal model."""

INDEX_KEYS = re.compile(r"(idxs|ids|indices|layers)$")
"""Names of lists of indices of layers."""


def rearranged(
    config: Config, layers: Sequence[Layer], count: int, first: int = 0
) -> dict[str, Any]:
    """The config, or a part of it, of a model that consists of layers of another one.

    Lists of layers are known by their keys; a layer has the entry of that which it copies.

    Args:
        config: that of the other model.
        layers: the layers.
        count: its number of layers.
        first: see ``by_layer``.
    """
    return {key: _moved(key, value, layers, count, first) for key, value in config.items()}


def _moved(key: str, value: Any, layers: Sequence[Layer], count: int, first: int) -> Any:
    entries = by_layer(key, value, count, first)
    if entries is value:
        part = isinstance(value, dict) and "model_type" not in value
        if not part or OTHER_MODALITIES.match(key):
            return value
        return rearranged(value, layers, count, first_index(value, count))
    moved = [entries[layer.of] for layer in layers]
    if entries == value and type(entries[0]) is type(value[0]):  # True equals 1
        return moved
    if isinstance(value, str):
        return "".join(moved)
    if isinstance(value, dict):
        return {str(at): entry for at, entry in enumerate(moved) if entry is not None}
    if isinstance(value[0], list):
        return [[moved, 1]]
    return [at for at, is_one in enumerate(moved, first) if is_one]


def by_layer(key: str, value: Any, count: int, first: int = 0) -> Any:
    """The entries that a key has for the layers one by one, as a new list; else the value itself.

    Args:
        key: the key.
        value: its value: a list with one entry for each layer, a text of a pattern with one letter
            for each, blocks of entries that are repeated, ``[[block, times], …]``, settings of
            single layers by their indices, or a list of the indices of some layers, which becomes
            one of whether a layer is among them.
        count: the number of layers.
        first: the index of the first layer in lists of indices.
    """
    if OTHER_MODALITIES.match(key) or not LAYER_KEYS.match(key):
        return value
    if isinstance(value, dict) and value and all(str(at).isdecimal() for at in value):
        single = {int(at): entry for at, entry in value.items()}
        return [single.get(at) for at in range(count)]
    listed = isinstance(value, list) and len(value) == count
    indices = _increase(value) and first <= value[0] and value[-1] < first + count
    if indices and (not listed or INDEX_KEYS.search(key)):
        return [at in value for at in range(first, first + count)]
    pattern = "pattern" in key and isinstance(value, str) and len(value) == count
    return _unrolled(value, count) or ([*value] if listed or pattern else value)


def _unrolled(blocks: Any, count: int) -> list[Any]:
    """The entries of blocks that are repeated, ``[[block, times], …]``; empty for other lists."""
    try:
        repeated = ([*block] * times for block, times in blocks if 0 < times <= count)
        entries = [*islice(chain.from_iterable(repeated), count + 1)]
    except (TypeError, ValueError):
        return []
    return entries if len(entries) == count else []


def first_index(part: Config, count: int) -> int:
    """The index of the first layer in a part of a config: 1 if a list ends with their number."""
    return int(
        max((indices[-1] for indices in part.values() if _increase(indices)), default=0) == count
    )


def _increase(value: Any) -> bool:
    """Whether a value is a list of whole numbers that increase."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) is int for number in value)
        and all(before < after for before, after in pairwise(value))
    )


def described(content: Any, where: str) -> Family:
    """Make a family from its description; see ``growkit.model.families.family_yaml``.

    Args:
        content: content of the YAML file.
        where: name of the description in messages.

    Raises:
        InputError: the description is invalid; the message names the key or tensor.
    """
    return Family(**read_description(content, where))


def shipped_family(name: str) -> Family:
    """The family described by a file of this package."""
    return _shipped_family(shipped()[name])


@cache
def _shipped_family(file: Path) -> Family:
    family = described(read_shipped(file), str(file))
    return with_code(family, file) if file.suffix == ".py" else family


def with_code(family: Family, file: Path, oldest: str = "5.24") -> Family:
    """A family with classes of growkit's own (``growkit.model.families.own_code``).

    Args:
        family: the family without them.
        file: their file.
        oldest: the oldest version of transformers that runs them.
    """
    auto_map = auto_map_of(file)
    return replace(
        family,
        architecture=auto_map["AutoModelForCausalLM"].rpartition(".")[-1],
        loads_with=(
            f"transformers {oldest} or later with trust_remote_code=True (the code is next to the "
            "weights)"
        ),
        auto_map=auto_map,
        code=partial(code_of, file),
    )


def families(key: str = "family", naming: str = "") -> dict[str, Family]:
    """The families of the package whose descriptions have a key, in alphabetical order of names.

    Args:
        key: a key that descriptions do not inherit. Other files are not parsed, which for all of
            them takes about 50 ms.
        naming: what the file must contain; other files are not parsed either.
    """
    files = shipped().items()
    of_files = {
        name: _shipped_family(file)
        for name, file in files
        if f"\n{key}:" in shipped_text(file) and naming in shipped_text(file)
    }
    of_modules = registered("own_classes", "OWN_CLASS")
    own = {name: own_class.family for name, own_class in of_modules.items()}
    return dict(sorted((of_files | own).items()))


def known_family(config: Config, described: Family | None = None) -> Family | None:
    """The family of a config, one that a user describes before the package's; None if none is."""
    model_type = config.get("model_type")
    if described and model_type in described.model_types:
        return described
    if not isinstance(model_type, str):
        return None
    candidates = families(naming=model_type).values()
    published = (family for family in candidates if family.published_as)
    fitting = (family for family in published if family.published_as.items() <= config.items())
    of_type = (family for family in candidates if model_type in family.model_types)
    return next(chain(fitting, of_type), None)


def unlisted_family(description: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The description stored with a model, or None if the package has a family for its type.

    Raises:
        InputError: the description is invalid.
    """
    if description is None:
        return None
    types = described(description, "the description of the family").model_types
    return None if any(known_family({"model_type": kind}) for kind in types) else description


def family_of(config: Config, where: str, described: Family | None = None) -> Family:
    """The family of a config.

    Args:
        config: contents of a ``config.json``.
        where: name of the config in messages.
        described: a family that the user describes, which is known in addition.

    Raises:
        InputError: no family has this model_type (the message lists the known ones), a size is
            larger than in any model, or the weights are still quantised.
    """
    model_type = config.get("model_type")
    if any(config.get(key) is not None for key in QUANTISED):
        raise InputError(f"the model in {where} is quantised; dequantise it first")
    family = known_family(config, described)
    if family is None:
        kinds = {kind for family in families().values() for kind in family.model_types}
        known = sorted(kinds.union(described.model_types if described else ()))
        inner, remedy = config.get("text_config"), "transformers has no class for it either"
        if config.get("auto_map"):
            remedy = "if you trust the code in that folder, growkit --trust-code FOLDER runs it"
        if isinstance(inner, dict):
            inside = f"the language model inside (text_config, {inner.get('model_type')!r})"
            remedy = f"{inside} cannot be taken out, save it as a folder of its own"
        raise InputError(
            f"{where} has model_type {model_type!r}, which no family describes; "
            f"known are {', '.join(known)}{perhaps(model_type, known)}; {remedy}"
        )
    family.check_bounds(config, where)
    return family
