"""Derive possible descriptions of a family from observations of its class.

A dimension is a sum of products of sizes. Sizes are doubled one by one and several at once; the
part of a dimension that changes with exactly some sizes is the term of their product.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

from growkit.base.axes import Pattern
from growkit.extras.family_inference.classes import ModelClass, one_of_experts
from growkit.extras.family_inference.layers import Conditions
from growkit.extras.family_inference.tracing import Observation
from growkit.model.families.config_keys import GROUPS, SCALING, TOP_K, WIDTH, last_part
from growkit.model.families.family_parts import BALANCING
from growkit.model.families.family_yaml import TIED, each_entry, module_of, writes_hidden

Terms = tuple[tuple[tuple[str, ...], int], ...]
"""Products of sizes in a dimension, each with its coefficient; the empty one is a constant."""

MOST = 6
"""Maximum number of sizes that a dimension can depend on."""

MAX_PARTS = 3
"""Maximum number of equal parts of a dimension that are written as a sum."""

LAST = ("hidden", "head_dim", "ffn")
"""The axes that come last in a product of axes."""

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}

LAYERS = "layers"
"""The axis of layers: some tensors have one part for each layer."""

SCALAR = "()"
"""The pattern of a single number."""


def ways_of(terms: Terms, width: bool) -> list[str]:
    """Possible patterns of a dimension, most likely first.

    Args:
        terms: the products of which it is the sum.
        width: whether to write heads times their size as hidden, for classes that compute one from
            the other.
    """
    written = [(_product(axes, width), count) for axes, count in terms]
    if len(written) == 1:
        return _counted(*written[0])
    patterns = []
    common = [axis for axis in written[0][0] if all(axis in factors for factors, _ in written)]
    for shared in (common[:1], []):
        parts = []
        for factors, count in written:
            rest = [axis for axis in factors if axis not in shared]
            if not rest or count > MAX_PARTS:
                rest, count = [number(count), *rest], 1
            parts.append([".".join(rest)] * count)
        for order in (parts, parts[::-1]):
            text = " + ".join(term for part in order for term in part)
            patterns.append(f"{shared[0]}.({text})" if shared else text)
    return list(dict.fromkeys(patterns))


COUNTS = re.compile(r"layers|heads|num|^n_|mult|groups|experts")
"""Names of axes that are numbers of things; in a product they come before widths."""


def _product(axes: tuple[str, ...], width: bool) -> list[str]:
    if width and {"heads", "head_dim"} <= {*axes}:
        axes = (*(axis for axis in axes if axis not in ("heads", "head_dim")), "hidden")
    return sorted(axes, key=lambda axis: 0 if COUNTS.search(axis) else 2 if axis in LAST else 1)


def number(count: int) -> str:
    """The name of the axis for a constant number."""
    return NUMBERS.get(count, f"times_{count}")


def count_of(axis: str) -> int | None:
    """The number of an axis that ``number`` named; None for any other axis."""
    words = {word: count for count, word in NUMBERS.items()}
    match = re.fullmatch(r"times_(\d+)", axis)
    return int(match[1]) if match else words.get(axis)


def _counted(factors: list[str], count: int) -> list[str]:
    """Patterns of a product and a constant, which may come first, last or next to a factor."""
    if count == 1:
        both = [factors, factors[::-1]] if len(factors) > 1 else [factors]
        return [".".join(names) or number(1) for names in both]
    if not factors:
        return [number(count)]
    places = [1, 0, len(factors)] if len(factors) > 1 else [0, 1]
    if count not in NUMBERS:  # probably a size rather than a repetition
        places.reverse()
    orders = [[*factors[:at], number(count), *factors[at:]] for at in dict.fromkeys(places)]
    return [".".join(names) for names in orders]


def composed(asked: ModelClass) -> dict[str, list[Terms]]:
    """Decompose every dimension of every tensor of a small model; one expert represents all."""
    here = asked.shapes({})
    assert here is not None
    axes = [axis for axis in asked.small if not (asked.derived and axis == "hidden")] + [LAYERS]
    moved = {axis: asked.shapes_of(_doubled(asked, (axis,))) for axis in axes}
    by_name = {}
    for name, shape in here.items():
        if one_of_experts(name) in by_name:
            continue
        dimensions, depends = [], axes
        if asked.layer_of(name) is not None:  # in a deeper model the layer may be of another kind
            depends = [axis for axis in axes if axis != LAYERS]
        for at, size in enumerate(shape):
            relevant = [a for a in depends if (moved[a] or {}).get(name, shape)[at] != size]
            dimensions.append(_terms(asked, name, at, size, relevant))
        by_name[one_of_experts(name)] = dimensions
    return by_name


def _sizes(asked: ModelClass) -> dict[str, int]:
    return asked.small | {LAYERS: asked.small_layers}


def _doubled(asked: ModelClass, axes: tuple[str, ...]) -> dict[str, int]:
    sizes = _sizes(asked)
    return sizes | {axis: 2 * sizes[axis] for axis in axes}


def _terms(asked: ModelClass, name: str, at: int, size: int, axes: list[str]) -> Terms:
    """The terms of a dimension; a constant if it is not a sum of products."""
    constant: Terms = (((), size),)
    if len(axes) > MOST:
        return constant
    values = {}
    for subset in _subsets(axes):
        shapes = asked.shapes_of(_doubled(asked, subset))
        if shapes is None or name not in shapes:
            return constant
        values[subset] = shapes[name][at]
    changes = {
        group: sum((-1) ** (len(group) - len(few)) * values[few] for few in _subsets(group))
        for group in values
    }
    terms = []
    for subset in values:
        part = sum(
            (-1) ** (len(more) - len(subset)) * changes[more]
            for more in values
            if {*subset} <= {*more}
        )
        count, rest = divmod(part, prod(_sizes(asked)[axis] for axis in subset))
        if rest or count < 0:
            return constant
        terms += [(subset, count)] if count else []
    if ("vocab",) in dict(terms) and len(terms) > 1:
        return constant
    return tuple(sorted(terms, key=lambda term: "kv_heads" in term[0]))


def _subsets(axes: list[str] | tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


@dataclass
class Proposal:
    """Findings about a class, from which descriptions are made.

    Attributes:
        asked: the class.
        seen: observations while it ran.
    """

    asked: ModelClass
    seen: Observation

    def __post_init__(self) -> None:
        self._dimensions = composed(self.asked)
        self._multiple = self._name_multiple()
        self._tied = self._ties()
        self._names: dict[str, dict[Any, list[str]]] = {}
        """By template: the tensors, by their patterns and whether their norm is the last."""
        for name in self._dimensions:
            norm = self.seen.norms.get(name)
            kinds = self._names.setdefault(self.asked.template(name), {})
            kinds.setdefault((tuple(self._ways(name)), norm and norm.last), []).append(name)
        self._conditions = Conditions(self.asked)
        self._when = {
            f"{template}#{at}": self._conditions.of(
                template, frozenset(int(self.asked.layer_of(name) or 0) for name in names)
            )
            for template, kinds in self._names.items()
            if "{layer}" in template
            for at, names in enumerate(kinds.values())
        }

    def _name_multiple(self) -> int | None:
        """Rename an MLP width that is a multiple of hidden to ``ffn``; return the factor."""
        if any(self._wide(axis) for axis in self.asked.small):
            return None
        full_width = ("heads", "head_dim") if self.asked.derived else ("hidden",)
        read = {
            (name, at): terms[0][1]
            for name, dimensions in self._dimensions.items()
            for at, terms in enumerate(dimensions)
            if (name, at) in self.seen.reads and [axes for axes, _ in terms] == [full_width]
        }
        factor = max(read.values(), default=1)
        if factor == 1:
            return None
        inside = {self.seen.spaces[place] for place, count in read.items() if count == factor}
        ffn: Terms = ((("ffn",), 1),)
        for name, dimensions in self._dimensions.items():
            self._dimensions[name] = [
                ffn if self.seen.spaces.get((name, at)) in inside else terms
                for at, terms in enumerate(dimensions)
            ]
        return factor

    def _ties(self) -> dict[str, str]:
        """Map the head's weight to the embedding that it is tied to in tied models."""
        model: Any = self.asked.model(self.asked.config({}), "meta")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if head is None or embedding is None or head not in names:
            return {}
        pair = {f"{names[head]}.weight": f"{names[embedding]}.weight"}
        return {a: b for a, b in pair.items() if {a, b} <= {*self._dimensions}}

    def ways(self) -> dict[str, list[str]]:
        """Possible patterns of every tensor, most likely first, by template and kind of layer."""
        return {
            f"{template}#{at}": [*ways]
            for template, kinds in self._names.items()
            for at, (ways, _) in enumerate(kinds)
        }

    def _ways(self, name: str) -> list[str]:
        dimensions = self._dimensions[name]
        if not dimensions:
            return [SCALAR]
        reads = {at for at in range(len(dimensions)) if (name, at) in self.seen.reads}
        if name in self._tied.values():
            reads = {0}
        elif name in self._tied:
            reads = {1}
        ways = [
            ways_of(terms, self.seen.is_hidden(name, at)) for at, terms in enumerate(dimensions)
        ]
        stacked = [at for at in range(len(ways)) if (name, at) in self.seen.stacks]
        first = len(stacked) if len(ways) > 2 and reads and stacked == [*range(len(stacked))] else 0
        mine, patterns = {at - first for at in reads if at >= first}, []
        for chosen in product(*ways):
            prefix, pattern = ", ".join(chosen[:first]), _with_roles(chosen[first:], mine)
            patterns.append(f"{prefix}: {pattern}" if prefix else pattern)
        return [*dict.fromkeys(patterns)]

    def description(self, chosen: Mapping[str, str], more: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the family with these patterns.

        Args:
            chosen: the pattern of every tensor, as ``ways`` names them.
            more: other entries.
        """
        asked = self.asked
        tensors, arranged = self._tensors(chosen)
        tied = self._tied | {
            name: of for name, of in asked.repeated.items() if self._tied and of in tensors
        }
        tensors |= {name: tensors[of] for name, of in tied.items() if name not in tensors}
        patterns = [pattern for pattern in chosen.values() if pattern != SCALAR]
        dimensions = [dimension for p in patterns for dimension in Pattern.parse(p).dimensions]
        axes = {axis for dimension in dimensions for axis in dimension.axes}
        if any("{expert}" in template for template in tensors):
            axes.add("experts")
        sizes = self._sizes(axes)
        computed = {"head_dim": "head_dim"} if "head_dim" in axes and asked.derived else {}
        if self._multiple:
            computed["intermediate_size"] = "ffn"
        content: dict[str, Any] = {
            "family": asked.name,
            "model_type": asked.value("model_type"),
            "sizes": sizes | computed,
            "kinds": {
                axis: "ffn" for axis in sorted(sizes.values()) if axis != "ffn" and self._wide(axis)
            },
            "assumed": self._assumed(sizes, axes, tensors),
            "computed": [*computed],
            "constants": {axis: count for axis in sorted(axes) if (count := count_of(axis))},
            "groups": self._groups(axes),
            "multiples": self._multiples(axes),
            "ratios": self._ratios(),
            "arranged": arranged,
            "lists": sorted(key for key in asked.lists if asked.said(key) is not None),
            "norms": self._bare_norms(axes),
            "recomputed": asked.recomputed,
            "normed_sums": self.seen.normed_sums,
            "tied": tied,
            "tensors": tensors,
        }
        return {key: value for key, value in {**content, **more}.items() if value}

    def _tensors(self, chosen: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The entries of all tensors, and of the settings that arrange their layers."""
        arranged: dict[str, Any] = {}
        described: dict[str, list[dict[str, Any]]] = {}
        for template, kinds in self._names.items():
            entries = []
            for at, names in enumerate(kinds.values()):
                pattern, when = chosen[f"{template}#{at}"], self._when.get(f"{template}#{at}")
                arranged |= self._conditions.arranged(when) if when else {}
                entry = self._tensor(names, pattern)
                entries.append(entry | ({"when": when} if when else {}))
            described[template] = entries
        _join_idle(described)
        _leave_out_idle(described)
        tensors = {template: _shortest(entries) for template, entries in described.items()}
        return tensors, arranged

    def _sizes(self, axes: set[str]) -> dict[str, str]:
        """The keys of sizes, with the axes behind them."""
        asked = self.asked
        sizes = {
            key: " + ".join([axis] * asked.times.get(key, 1))
            for axis, keys in asked.sizes.items()
            if axis in axes or axis in ("hidden", "heads", "intermediate_size")
            for key in keys
        }
        equal = [key for key in asked.cache_keys if asked.value(key) == asked.layers]
        return sizes | dict.fromkeys((asked.layers_key, *equal), "layers")

    def _multiples(self, axes: set[str]) -> dict[str, str]:
        """The keys whose sizes must be multiples of others."""
        asked, multiples = self.asked, {}
        if {"heads", "kv_heads"} <= axes:
            multiples[asked.sizes["heads"][0]] = asked.sizes["kv_heads"][0]
        if asked.derived or (asked.divided and "heads" in axes):
            multiples[asked.sizes["hidden"][0]] = asked.sizes["heads"][0]
        return multiples

    def _groups(self, axes: set[str]) -> dict[str, Any]:
        """The groups of heads: by key-value head, or each head alone."""
        if {"heads", "kv_heads"} <= axes:
            return {"heads": "kv_heads"}
        return {"heads": []} if self.asked.derived else {}

    def _bare_norms(self, axes: set[str]) -> list[dict[str, Any]]:
        """The norms without a weight, each with the axis that has the width of its input."""
        norms = []
        for norm, width in self.seen.bare:
            over = next(
                (axis for axis in ("hidden", *sorted(axes)) if self.asked.small.get(axis) == width),
                None,
            )
            if over is not None:
                said = {"norm": over, "eps": norm.eps, "centred": norm.centred}
                norms.append({key: value for key, value in said.items() if value})
        return norms

    def _ratios(self) -> dict[str, str]:
        if self.asked.ratio is None:
            return {}
        axis_of = {key: axis for axis, keys in self.asked.sizes.items() for key in keys}
        key, over, under = self.asked.ratio
        return {key: f"{'.'.join(axis_of[factor] for factor in over)} / {axis_of[under]}"}

    def experts(self, chosen: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Possible rules by which the class uses its experts."""
        value = self.asked.value
        top_k = [key for key in self.asked.numbers if TOP_K.search(key)]
        widths = [
            axis
            for name, pattern in chosen.items()
            if "{expert}" in name or pattern.startswith("experts: ")
            for match in [re.search(r"hidden <- (\w+)$|(\w+) -> hidden$", pattern)]
            if match and (axis := match[1] or match[2]) in self.asked.small
        ]
        if not widths or not top_k:
            return
        rule: dict[str, Any] = {"width": widths[0], "top_k": top_k[0]}
        counts = self.asked.numbers
        groups = [key for key in GROUPS if counts.get(key)]
        if len(groups) == 2:
            rule["groups"] = groups
        if self._balancing:
            rule["balancing"] = self._balancing[0]
        yield rule
        for key in (key for key in self.asked.resolved if SCALING.search(key) and value(key)):
            yield rule | {"scaling": key, "alone": True}
        yield rule | {"alone": True}
        yield rule | {"divided": True}

    @property
    def _balancing(self) -> list[str]:
        return [key for key in self.asked.resolved if BALANCING.fullmatch(key)]

    def _wide(self, axis: str) -> bool:
        return axis != "experts" and any(
            WIDTH.search(last_part(key)) for key in self.asked.sizes.get(axis, ())
        )

    def _assumed(
        self, sizes: Mapping[str, str], axes: set[str], tensors: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Defaults of the class for keys that the config leaves out."""
        asked = self.asked
        keys = *sizes, *self._balancing
        assumed = {key: asked.value(key) for key in keys if asked.said(key) is None}
        stated = "head_dim" in asked.sizes and asked.said(asked.sizes["head_dim"][0]) is not None
        if {"head_dim", "heads"} <= axes and (asked.derived or not stated):
            hidden, heads = asked.sizes["hidden"][0], asked.sizes["heads"][0]
            head_dim = asked.small["hidden"] // asked.small["heads"]
            if asked.derived or head_dim == asked.small["head_dim"]:
                assumed["head_dim"] = f"{hidden} / {heads}"
        if asked.width:
            key, factor = asked.width
            assumed[key] = f"{factor} * {asked.sizes['hidden'][0]}"
        if self._multiple:
            assumed["intermediate_size"] = f"{self._multiple} * {asked.sizes['hidden'][0]}"
        entries = [entry for _, entry in each_entry(tensors, "pattern")]
        assumed |= {entry["eps"]: asked.value(entry["eps"]) for entry in entries if "eps" in entry}
        said = [entry["when"] for entry in entries if "when" in entry]
        for key in {word for text in said for word in re.findall(r"[A-Za-z_]\w*", text)}:
            if asked.value(key) is not None and key != "layer":
                value = asked.value(key)
                assumed[key] = [*value] if isinstance(value, list | tuple) else value
        if self._tied:
            assumed[TIED] = bool(asked.value(TIED))
        return {key: value for key, value in assumed.items() if value is not None}

    def _tensor(self, names: list[str], pattern: str) -> dict[str, Any]:
        said: dict[str, Any] = {"pattern": pattern}
        name = names[0]
        if name in self.asked.indices:
            said["indices"] = True
        if power := self.seen.powers.get(name):
            said["powers"] = {"hidden": power}
        # A layer whose stream starts afresh, or is not returned, may show less than similar layers.
        if idle := [self.seen.idle[tensor] for tensor in names if tensor in self.seen.idle]:
            said["idle"] = idle[0]
        norm = self.seen.norms.get(name)
        if norm is None:
            return said
        if norm.last and self._tied and pattern == "hidden":
            said["tied"] = "<- hidden"
        if name.endswith(".weight"):
            said["norm"] = pattern.rpartition(", ")[2].split(".")[0]
            if norm.eps:
                said["eps"] = norm.eps
            if norm.centred:
                said["centred"] = True
            if norm.offset:
                said["offset"] = norm.offset
        return said


def _join_idle(tensors: Mapping[str, list[dict[str, Any]]]) -> None:
    """Give matrices the value of the bias, in a layer that returns its input, that joins them.

    The bias of a module with matrices for experts is added to what they compute together.
    """
    for bias in [name for name in tensors if name.endswith("bias")]:
        around, (first, *_) = module_of(bias) + ".", tensors[bias]
        if first.get("idle") != 0 or "norm" in first:
            continue
        for name in (name for name in tensors if name.startswith(around)):
            for entry in tensors[name]:
                if writes_hidden(name, entry["pattern"], set()) and "<-" in entry["pattern"]:
                    entry.setdefault("idle", 0.0)


def _leave_out_idle(tensors: Mapping[str, list[dict[str, Any]]]) -> None:
    """Drop the values of tensors in a layer that returns its input where they are the default."""
    norms = {module_of(name) for name, entries in tensors.items() if "norm" in entries[0]}
    every = [(name, entry) for name, entries in tensors.items() for entry in entries]
    if all(
        entry.get("idle")
        == (0.0 if "{layer}" in name and writes_hidden(name, entry["pattern"], norms) else None)
        for name, entry in every
    ):
        for _, entry in every:
            entry.pop("idle", None)


def _shortest(entries: list[dict[str, Any]]) -> Any:
    """The shortest form of a tensor's entries."""
    (first, *others) = entries
    return entries if others else first["pattern"] if first.keys() == {"pattern"} else first


def _with_roles(dimensions: tuple[str, ...], reads: set[int]) -> str:
    """The pattern of some dimensions; ``reads`` has the positions of those that are read."""
    if len(dimensions) == 1 and reads:
        return f"<- {dimensions[0]}"
    if len(dimensions) == 2 and len(reads) == 1:
        return " <- ".join(dimensions) if reads == {1} else " -> ".join(dimensions)
    return ", ".join(dimensions)


def group_of(ways: list[str]) -> tuple[str, ...]:
    """The side of the possible patterns, reading or writing, on which they differ."""
    sides = [re.split(r" (?:<-|->) ", way) for way in ways]
    if len({len(halves) for halves in sides}) > 1:
        return tuple(ways)
    parts = [{halves[at] for halves in sides} for at in range(len(sides[0]))]
    at = next((at for at, part in enumerate(parts) if len(part) > 1), 0)
    return tuple(halves[at] for halves in sides)


def choices(ways: Mapping[str, list[str]], axes: set[str]) -> Iterator[dict[str, str]]:
    """Alternative patterns for tensors that have these axes, fewest changes first.

    Tensors with the same alternatives, such as a weight and its bias, change together.
    """
    groups = {}
    for alternatives in ways.values():
        concerned = any(
            re.search(rf"\b{axis}\b", pattern) for pattern in alternatives for axis in axes
        )
        if len(alternatives) > 1 and concerned:
            groups[group_of(alternatives)] = len(alternatives)
    for count in (1, 2, 3):
        for chosen in combinations(groups, count):
            for numbers in product(*(range(1, groups[group]) for group in chosen)):
                at = dict(zip(chosen, numbers, strict=True))
                yield {
                    name: patterns[at[group_of(patterns)]]
                    for name, patterns in ways.items()
                    if len(patterns) > 1 and group_of(patterns) in at
                }
