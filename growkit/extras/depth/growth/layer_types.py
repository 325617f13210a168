"""The layers of a deeper model, and their types: which layer a new one copies, and the config.

A class, or other software, may derive the type of a layer from its index, so that not every order
of layers has a config.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.extras.depth.relayering import derived_lists, relayered
from growkit.model.families.config_keys import PERIODS
from growkit.model.families.family import Family, Layer, rearranged
from growkit.model.families.family_parts import Member
from growkit.model.model import Model

PLACES = ("even", "end")

DEEP = 64
"""Number of layers among which every kind occurs that a class alternates by default."""

HANDING_ON = "num_kv_shared_layers"
"""A key of classes whose last layer of each type hands on keys and values, for other layers or for
an assistant, which drafts for the model."""


def of_kind(source: Model, order: Sequence[Layer], options: Mapping[str, str]) -> list[list[Layer]]:
    """Turn new layers into such of another kind, of which each copies the nearest layer, if any.

    Returns:
        The order; if the user names no place, also those with new layers before the layers that
        they would follow, last and first: from one of them other software may derive the types.

    Raises:
        InputError: the class has no layers of this kind, or they would not be idle.
    """
    family, complete, kind = source.family, source.complete, options["kind"]
    if options["blocks"] != "identity":
        raise InputError(
            f"kind is {kind!r}, but layers of {options['blocks']} are copies; leave out --kind"
        )
    named = {"model_type", *family.size_keys}
    sizes = {key: value for key, value in source.config.items() if key in named}
    deep = {family.layers_key: DEEP}
    lists = [derived_lists(family, {**config, **deep}) for config in (source.config, sizes)]
    stored = {key: complete.get(key) for key in family.lists.union(*lists)}
    present = {key: of if isinstance(of, list) else [] for key, of in stored.items()}
    kinds = {
        entry: key
        for by_key in (*lists, present)
        for key, entries in by_key.items()
        for entry in entries
        if isinstance(entry, str) and present[key]
    }
    if kind not in kinds:
        known = ", ".join(sorted(kinds)) or "layers of one kind"
        raise InputError(
            f"kind is {kind!r}, but {family.one} as in {source.where()} has {known} only; choose "
            "another kind, or leave out --kind"
        )
    key = kinds[kind]
    alike = [layer for layer, entry in enumerate(present[key]) if entry == kind]

    def nearest(layer: Layer) -> Layer:
        if not layer.idle:
            return layer
        of = min(alike, key=lambda other: abs(other - layer.of), default=layer.of)
        return Layer(of, True, {} if alike else {key: kind})

    orders = [order]
    if options.get("place", PLACES[0]) == PLACES[0]:
        orders += [
            sorted(order, key=lambda layer: (layer.of, not layer.idle)),
            sorted(order, key=lambda layer: layer.idle),
            sorted(order, key=lambda layer: not layer.idle),
        ]
    return [[nearest(layer) for layer in order] for order in orders]


def deeper_config(
    source: Model, order: list[Layer], options: Mapping[str, str]
) -> tuple[Config, list[Layer], list[str], Collection[str]]:
    """Find the config of the target, and the nearest order of layers that it can have.

    Other software (llama.cpp, MLX, vLLM, older transformers) may derive the type of a layer from
    its index and keys such as ``sliding_window_pattern``, without the list that the config has. So
    what follows from the index in the source does so in the target, if some order allows it.

    Returns:
        The config, the order, and if no order allows it, a warning and the keys that contradict it.
    """
    family, asked = source.family, "kind" in options
    layered = partial(relayered, family, source.config, where=source.where())
    # A published period may be unknown to the class that reads the config.
    published = source.published or {}
    published = source.config | (published if family.layers_key in published else {})
    unread = {key: said for key, said in published.items() if key not in source.config}
    said = {**published, **rearranged(unread, order, source.sizes["layers"])}
    identity = options["blocks"] == "identity" and not asked
    movable = options.get("place", PLACES[0]) in PLACES
    tried = []
    for arrange in (True, False):
        config = layered(order, arrange=arrange)
        changed = {key: of for key, of in config.items() if of != source.config.get(key)}
        types = _derived(source, published, {**said, **changed})
        fitting = order
        if identity:
            wanted = layered(types.taken_by(order), arrange=arrange)
            fitting = _fit_kinds(source, wanted, order, types, movable)
        others = types.others(fitting, asked)
        if not others:
            fitting = types.taken_by(fitting)
            return layered(fitting, arrange=arrange), fitting, [], ()
        tried.append((config, types, others))
    config, types, others = tried[0]
    if identity:
        order = _fit_kinds(source, config, order, Types({}, {}), movable)
    config = layered(order)
    config, warnings, contradicting = _contradicted(family, config, order, types, others, said)
    if any(layer.idle for layer in order):
        placed = options.get("place", PLACES[0]) != PLACES[0]
        remedy = "leave out --place" if placed else "choose another number of layers"
        warnings = [f"{warning}; {remedy}" for warning in warnings]
    return config, order, warnings, contradicting


Lists = Mapping[str, list[Any]]
"""Lists with one entry for each layer, by their keys."""


class Types(NamedTuple):
    """Types of layers that follow from other keys of a config.

    Attributes:
        before: the lists of the source.
        after: the same lists of the target, as its class would derive them.
    """

    before: Lists
    after: Lists

    def alike(self, layer: Layer, place: int) -> bool:
        """Whether a layer has the types that its place would derive."""
        return all(self.before[key][layer.of] == self.after[key][place] for key in self.before)

    def taken_by(self, order: Sequence[Layer]) -> list[Layer]:
        """The layers with the types that their places would derive."""

        def types_of(layer: Layer, place: int) -> dict[str, Any]:
            types = {key: entries[place] for key, entries in self.after.items()}
            return {key: of for key, of in types.items() if self.before[key][layer.of] != of}

        return [
            replace(layer, entries={**layer.entries, **types_of(layer, place)})
            for place, layer in enumerate(order)
        ]

    def others(self, order: Sequence[Layer], asked: bool) -> dict[str, int]:
        """For each list, the first place of a layer that needs another entry than derived there.

        Args:
            order: the layers.
            asked: whether a user asks for the kind of new layers, so that they need it.
        """
        others: dict[str, int] = {}
        for key, entries in self.before.items():
            for place, layer in enumerate(order):
                counts = asked or not layer.idle
                if counts and layer.entry(key, entries) != self.after[key][place]:
                    others.setdefault(key, place)
        return others


def _derived(source: Model, config: Config, deeper: Config) -> Types:
    """Find the types of layers that follow from other keys, or from nothing but the class.

    Args:
        source: the source.
        config: its config, with the keys that its publisher wrote.
        deeper: likewise, of the target.
    """
    family = source.family
    both = (  # with what the class takes from parts, but without these
        {key: value for key, value in of.items() if key not in source.nested_keys}
        for of in (config, deeper)
    )
    (complete, here_sizes), (_, there_sizes) = map(family.solved, both)
    count, more = here_sizes["layers"], there_sizes["layers"]
    here, there = derived_lists(family, config), derived_lists(family, deeper)
    if family.class_lists:  # LFM2 lists attention in one key or another: null here, if in the other
        here = {key: here[key] for key in here.keys() & family.class_lists(config).keys()}
    kept = {key: said for key, said in config.items() if deeper.get(key) == said}
    lists, derived = {}, {}
    for key in sorted(family.lists | here.keys()):
        values = (complete.get(key) or here.get(key) or [])[:count]
        if not all(isinstance(value, int | str | None) for value in values):
            continue  # settings, no types
        if values == here.get(key) and key in there:
            lists[key], derived[key] = values, there[key]
        elif repeated := _repeated(kept, values, more):
            lists[key], (_, derived[key]) = values, repeated
    return Types(lists, derived)


def _repeated(config: Config, values: Sequence[Any], count: int) -> tuple[str, list[Any]] | None:
    """Find the key of a period or a pattern that a list follows, and the list for more layers."""
    for key, said in config.items():
        if not PERIODS.search(key) or isinstance(said, bool) or not isinstance(said, int | str):
            continue
        if isinstance(said, int) and not 1 < said <= len(values):
            continue
        pattern = said if isinstance(said, str) else "-" * (said - 1) + "+"
        pairs = {(pattern[at % len(pattern)], value) for at, value in enumerate(values)}
        kinds = dict(pairs)
        if 1 < len(pairs) == len({*kinds.values()}) == len({*pattern}):
            return key, [kinds[pattern[at % len(pattern)]] for at in range(count)]
    return None


def _contradicted(
    family: Family,
    config: Config,
    order: Sequence[Layer],
    types: Types,
    others: Mapping[str, int],
    published: Config,
) -> tuple[Config, list[str], Collection[str]]:
    """Change or leave out keys from which other software would derive other lists.

    Args:
        family: the family.
        config: config of the target.
        order: its layers.
        types: see ``Types``.
        others: see ``Types.others``; not empty.
        published: config of the target, with the keys that the source's publisher wrote.

    Returns:
        The config, with a number from which the lists are derived as they are, such as that of
        layers without windows; without one, the config without the keys, a warning, and the keys.

    Raises:
        InputError: the class derives a list, whatever a config says.
    """
    values = {key: [layer.entry(key, types.before[key]) for layer in order] for key in others}
    listed, place = next(iter(others.items()))
    if listed in family.derived:
        raise InputError(
            f"layer {place} of {family.one} would be one of {values[listed][place]}, but its class "
            f"derives {types.after[listed][place]} from the index; choose another number or place"
        )
    config = {**config, **values}
    said = {**published, **config}
    own = derived_lists(family, said)
    numbers = {
        key: said[key] + 1
        for key in said.keys() - family.size_keys - family.defaults.keys()
        if type(said[key]) is int
    }
    contradicting = {
        key
        for key, other in numbers.items()
        if any(derived_lists(family, {**said, key: other}).get(k) != own.get(k) for k in others)
    }
    for key in sorted(contradicting & config.keys()):
        for number in range(len(order) + 1):
            if derived_lists(family, {**said, key: number}).items() >= values.items():
                return {**config, key: number}, [], ()
    repeated = (_repeated(said, types.after[key], 0) for key in others)
    contradicting |= {keys[0] for keys in repeated if keys}
    left_out = "".join(f"; {key} is left out" for key in sorted(contradicting))
    warning = (
        f"software that derives {listed} from the index of a layer instead of reading it would "
        f"take layer {place} ({values[listed][place]}) for {types.after[listed][place]}"
        f"{left_out}"
    )
    config = {key: value for key, value in config.items() if key not in contradicting}
    return config, [warning], contradicting


def _fit_kinds(
    source: Model, deeper: Config, order: list[Layer], types: Types, movable: bool
) -> list[Layer]:
    """Find the nearest order in which every layer has the kind that the class has at its index.

    A class may choose kinds by layer index, e.g. with a period, or compute with the index. New
    layers do nothing at first, so each can be a copy of any layer with the same tensors. In some
    classes the last layer of a type hands its keys and values on, which only that of the source
    can do.

    Args:
        source: the source.
        deeper: config of the target in the wanted order.
        order: the wanted order.
        types: see ``Types``.
        movable: whether layers of the source can be at other places than in the wanted order.
    """
    family = source.family
    before, after = members_by_layer(family, source.config), members_by_layer(family, deeper)
    numbered = family.numbered(source.complete)

    def fits(layer: Layer, place: int) -> bool:
        same = before[layer.of].keys() == after[place].keys()
        stays = layer.idle or (types.alike(layer, place) and (not numbered or layer.of == place))
        return same and stays

    present = [Layer(of) for of in before]
    wanted = [place for place, layer in enumerate(order) if not layer.idle]
    fit = all(fits(layer, at) and types.alike(layer, at) for at, layer in enumerate(order))
    if fit and not new_layer_hands_on(source, order):
        return order
    latest, place = [0] * len(present), len(order)
    for layer in reversed(present):
        place = max((earlier for earlier in range(place) if fits(layer, earlier)), default=-1)
        latest[layer.of] = place

    # Each after its new layers, rather than before them, or all of them last.
    ways = [wanted, [*(at - 1 for at in wanted[1:]), len(order) - 1], latest]
    for way in ways if movable else ways[:1]:
        layers = _filled(len(order), way, latest if movable else way, fits, types.alike)
        kept = {place: layer.of for place, layer in enumerate(layers) if not layer.idle}
        covered = [*kept.values()] == [*before] and len(layers) == len(order)
        stays = movable or [*kept] == wanted
        if covered and stays and not new_layer_hands_on(source, layers):
            return layers
    return order


def new_layer_hands_on(source: Model, order: Sequence[Layer]) -> bool:
    """Whether the last layer of a type is a new one, in a class that makes it hand values on."""
    if source.complete.get(HANDING_ON) is None:
        return False
    tensors = members_by_layer(source.family, source.config)
    types = source.complete.get("layer_types") or [""] * len(tensors)
    last = {
        (*tensors[layer.of], str(layer.entry("layer_types", types))): layer  # any type in a file
        for layer in order
    }
    return any(layer.idle for layer in last.values())


Fits = Callable[[Layer, int], bool]
"""Whether a layer can be at a place of the target."""


def _filled(
    count: int, wanted: Sequence[int], latest: Sequence[int], fits: Fits, alike: Fits
) -> list[Layer]:
    """Put layers of the source where they fit, and copies of them that do between them.

    Args:
        count: number of layers of the target.
        wanted: the first place of every layer of the source.
        latest: its last possible place, which may be before the wanted one.
        fits: see ``Fits``.
        alike: whether a copy that fits has the type of its place, too.
    """
    layers: list[Layer] = []
    for place in range(count):
        of = sum(not layer.idle for layer in layers)
        if of < len(wanted) and place >= min(wanted[of], latest[of]) and fits(Layer(of), place):
            layers.append(Layer(of))
            continue
        copies = [copy for at in range(len(wanted)) if fits(copy := Layer(at, True), place)]
        copies.sort(key=lambda copy: (not alike(copy, place), abs(copy.of - of + 1)))
        layers += copies[:1]
    return layers


def members_by_layer(
    family: Family, config: Config
) -> dict[int, dict[tuple[str, int | None], Member]]:
    """The tensors of every layer, in order, by their names with ``{layer}``."""
    by_layer: dict[int, dict[tuple[str, int | None], Member]] = {}
    for member in family.members(config):
        if member.layer is not None:
            by_layer.setdefault(member.layer, {})[member.tensor.name, member.number] = member
    return dict(sorted(by_layer.items()))
