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

from safetensors.torch import load_file

from growkit.algebra.axes import Pattern
from growkit.base.errors import InputError
from growkit.checkpoint.publishing import temporary
from growkit.engine.oracle import quiet
from growkit.families.described import TIED
from growkit.inference.classes import ModelClass, not_inferred
from growkit.inference.running import Observation

Terms = dict[tuple[str, ...], int]
"""Coefficient of each product of sizes in a dimension; the empty product is a constant."""

MOST = 5
"""Limit for the sizes that a dimension can depend on."""

ORDER = ("kv_heads", "heads", "head_dim")
"""The factors that come last when a product of axes is stored."""

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


@dataclass(frozen=True)
class Composed:
    """A dimension as a sum of products of sizes.

    Attributes:
        terms: see ``Terms``.
    """

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def ways(self, width: bool) -> list[str]:
        """Possible patterns of the dimension, most likely first.

        Args:
            width: whether to write heads times their size as hidden, for classes that compute one
                from the other.
        """
        written = [(_product(axes, width), count) for axes, count in self.terms]
        if len(written) == 1:
            (factors, count), *_ = written
            return _counted(factors, count)
        parts = [
            [".".join(factors)] * count if factors else [number(count)]
            for factors, count in written
        ]
        forward = [each for part in parts for each in part]
        backward = [each for part in reversed(parts) for each in part]
        return list(dict.fromkeys(" + ".join(each) for each in (forward, backward)))


def _product(axes: tuple[str, ...], width: bool) -> list[str]:
    if width and {"heads", "head_dim"} <= {*axes}:
        axes = (*(axis for axis in axes if axis not in ("heads", "head_dim")), "hidden")
    return sorted(axes, key=lambda axis: ORDER.index(axis) if axis in ORDER else -1)


def number(count: int) -> str:
    """The name of a number as an axis."""
    return NUMBERS.get(count, f"times_{count}")


def _counted(factors: list[str], count: int) -> list[str]:
    """Patterns of a product with a number, which comes first, last or next to a factor."""
    if count == 1:
        return [".".join(factors) or number(1)]
    if not factors:
        return [number(count)]
    places = [1, 0, len(factors)] if len(factors) > 1 else [0, 1]
    each = [[*factors[:at], number(count), *factors[at:]] for at in dict.fromkeys(places)]
    return [".".join(names) for names in each]


def composed(asked: ModelClass) -> dict[str, list[Composed]]:
    """Decompose every dimension of every tensor of a small model.

    Raises:
        InputError: a dimension is not a sum of products of sizes.
    """
    here = asked.shapes(asked.small)
    assert here is not None
    axes = [axis for axis in asked.small if axis != "layers"]
    if asked.square:
        axes.remove("hidden")
    moved = {axis: _shapes(asked, (axis,)) for axis in axes}
    found = {}
    for name, shape in here.items():
        dimensions = []
        for at, size in enumerate(shape):
            relevant = [
                a for a in axes if moved[a] is None or moved[a].get(name, shape)[at] != size
            ]
            dimensions.append(_composed(asked, name, at, relevant))
        found[name] = dimensions
    return found


def _shapes(asked: ModelClass, doubled: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    found = asked.shapes(asked.small | {axis: 2 * asked.small[axis] for axis in doubled})
    if found is None:
        raise not_inferred(
            f"{asked.name} has no model in which {' and '.join(doubled)} alone are twice as much"
        )
    return dict(found)


def _composed(asked: ModelClass, name: str, at: int, axes: list[str]) -> Composed:
    if len(axes) <= MOST:
        values = {some: _shapes(asked, some)[name][at] for some in _subsets(axes)}
        changes = {
            some: sum((-1) ** (len(some) - len(few)) * values[few] for few in _subsets(some))
            for some in values
        }
        parts = {
            some: sum(
                (-1) ** (len(more) - len(some)) * changes[more]
                for more in values
                if {*some} <= {*more}
            )
            for some in values
        }
        terms = []
        for some, part in parts.items():
            count, rest = divmod(part, prod(asked.small[axis] for axis in some))
            if rest or count < 0:
                break
            terms += [(some, count)] if count else []
        else:
            return Composed(tuple(sorted(terms, key=lambda term: "kv_heads" in term[0])))
    raise not_inferred(
        f"dimension {at + 1} of tensor {name} of a {asked.name} model is no sum of products of "
        f"sizes ({', '.join(axes)})"
    )


def _subsets(axes: list[str] | tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for count in range(len(axes) + 1):
        yield from combinations(axes, count)


@dataclass
class Proposal:
    """Findings about a class, from which descriptions are made.

    Attributes:
        asked: the class.
        seen: observations while it ran.
        files: names of the tensors of the checkpoint.
    """

    asked: ModelClass
    seen: Observation
    files: frozenset[str]

    def __post_init__(self) -> None:
        self._dimensions = composed(self.asked)
        self._names = self._templates()
        self._stored = _stored_names(self.asked)
        self._tied = self._ties()

    def _templates(self) -> dict[str, str]:
        """Templates of tensor names with ``{layer}``, each with one of its tensors.

        Raises:
            InputError: layers have tensors of different kinds, or files have other names.
        """
        here = self.asked.shapes(self.asked.small) or {}
        shapes = self.asked.shapes(self.asked.small | {"layers": self.asked.layers}) or here
        begin = re.escape(self.seen.layers)
        found: dict[str, list[str]] = {}
        for name in shapes:
            template = re.sub(f"^{begin}\\d+\\.", f"{self.seen.layers}{{layer}}.", name)
            found.setdefault(template, []).append(name)
        layers = max(len(names) for names in found.values())
        for template, names in found.items():
            alike = len({shapes[name] for name in names}) == 1
            if "{layer}" in template and (len(names) != layers or not alike):
                raise not_inferred(
                    f"not all layers of a {self.asked.name} model like this have the same tensors "
                    f"(first {names[0]}), which cannot be inferred"
                )
        first = {template: template.replace("{layer}", "0") for template in found}
        return {template: name for template, name in first.items() if name in here}

    def stored(self, template: str) -> str:
        """Template of the tensors' names in files, in the form of the checkpoint."""
        own = self._names[template]
        name = self._stored.get(own, own)
        if name == own or own in self.files:
            return template
        place = re.search(r"(?<=\.)0(?=\.)", name)
        if place is None or "{layer}" not in template:
            return name
        return name[: place.start()] + "{layer}" + name[place.end() :]

    def _ties(self) -> dict[str, str]:
        """Map the head's weight to the embedding that it is tied to in tied models."""
        model: Any = self.asked.model(self.asked.config(self.asked.small), "meta")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if head is None or embedding is None or head not in names:
            return {}
        return {f"{names[head]}.weight": f"{names[embedding]}.weight"}

    def ways(self) -> dict[str, list[str]]:
        """Possible patterns of every tensor, most likely first."""
        found = {}
        for template, name in self._names.items():
            module, _, parameter = name.rpartition(".")
            if not self._dimensions[name]:
                raise InputError(
                    f"tensor {template} of a {self.asked.name} model is a single number, which no "
                    "pattern describes, so its family cannot be inferred"
                )
            patterns = list(dict.fromkeys(self._patterns(module, parameter, name)))
            if not patterns:
                raise not_inferred(
                    f"what {self.asked.name} does with tensor {template} cannot be seen"
                )
            found[template] = patterns
        return found

    def _patterns(self, module: str, parameter: str, name: str) -> Iterator[str]:
        dimensions = self._dimensions[name]
        kind = self.seen.kinds.get(module)
        inside = self.seen.in_attention(module)
        if kind in ("linear", "transposed") and parameter in ("weight", "bias"):
            reads = not inside or module in self.seen.reads_hidden
            writes = not inside or not reads
            if parameter == "bias":
                yield from dimensions[0].ways(writes)
                return
            out, into = dimensions if kind == "linear" else reversed(dimensions)
            for written, read in product(out.ways(writes), into.ways(reads)):
                yield f"{written} <- {read}" if kind == "linear" else f"{read} -> {written}"
        elif kind == "embedding":
            for read, written in product(*(each.ways(True) for each in dimensions)):
                yield f"{read} -> {written}"
        elif len(dimensions) == 1 or kind == "norm":
            for each in product(*(each.ways(not inside) for each in dimensions)):
                yield ", ".join(each)
        elif not dimensions or all(not axes for each in dimensions for axes, _ in each.terms):
            yield ", ".join(each.ways(False)[0] for each in dimensions)

    def description(self, patterns: Mapping[str, str], *, rooted: bool = False) -> dict[str, Any]:
        """Describe the family with these patterns.

        Args:
            patterns: the pattern of every tensor.
            rooted: whether the class multiplies embeddings by the square root of hidden.
        """
        asked = self.asked
        tensors: dict[str, Any] = {
            self.stored(template): self._tensor(self._names[template], pattern)
            for template, pattern in patterns.items()
        }
        if rooted:
            tensors |= {
                self.stored(template): {"pattern": pattern, "root": "hidden"}
                for template, pattern in patterns.items()
                if pattern == "vocab -> hidden"
            }
        dimensions = [each for p in patterns.values() for each in Pattern.parse(p).dimensions]
        axes = {axis for dimension in dimensions for axis in dimension.axes}
        sizes = {
            key: axis
            for axis, key in asked.sizes.items()
            if axis in axes or axis in ("layers", "hidden", "heads")
        }
        sizes |= dict.fromkeys(sorted(asked.followers), "hidden")
        constants = {each: _count(each) for each in sorted(axes - {*sizes.values()} - {"head_dim"})}
        multiples = {}
        if {"heads", "kv_heads"} <= axes:
            multiples[asked.sizes["heads"]] = asked.sizes["kv_heads"]
        if self._wants_whole_heads():
            multiples[asked.sizes["hidden"]] = asked.sizes["heads"]
        computed = ["head_dim"] if "head_dim" in axes and asked.derived else []
        content: dict[str, Any] = {
            "family": asked.name,
            "model_type": asked.value("model_type"),
            "sizes": sizes | dict.fromkeys(computed, "head_dim"),
            "assumed": self._assumed(sizes, axes, tensors),
            "computed": computed,
            "constants": constants,
            "groups": {"heads": "kv_heads"} if {"heads", "kv_heads"} <= axes else {},
            "multiples": multiples,
            "lists": asked.lists,
            "tied": {self.stored(a): self.stored(of) for a, of in self._tied.items()},
            "tensors": tensors,
        }
        return {key: value for key, value in content.items() if value}

    def _assumed(
        self, sizes: Mapping[str, str], axes: set[str], tensors: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Defaults of the class for keys that the config leaves out."""
        asked = self.asked
        found = {key: asked.value(key) for key in sizes if asked.said(key) is None}
        if "head_dim" in axes and asked.splits_hidden:
            found["head_dim"] = f"{asked.sizes['hidden']} / {asked.sizes['heads']}"
        eps = [each["eps"] for each in tensors.values() if isinstance(each, dict) and "eps" in each]
        found |= {key: asked.value(key) for key in eps}
        if self._tied:
            found[TIED] = bool(asked.value(TIED))
        return {key: value for key, value in found.items() if value is not None}

    def _tensor(self, name: str, pattern: str) -> str | dict[str, Any]:
        norm = self.seen.norms.get(name.rpartition(".")[0])
        if norm is None:
            return pattern
        said: dict[str, Any] = {"pattern": pattern}
        if norm.last and self._tied and pattern == "hidden":
            said["tied"] = "<- hidden"
        if name.endswith(".weight"):
            said["norm"] = pattern.rpartition(", ")[2].split(".")[0]
            if norm.eps:
                said["eps"] = norm.eps
            said |= {key: True for key in ("centred", "behind") if getattr(norm, key)}
            if norm.offset:
                said["offset"] = norm.offset
        return said if len(said) > 1 else pattern

    def _wants_whole_heads(self) -> bool:
        """Whether the class accepts only hidden sizes that are multiples of its heads."""
        small = self.asked.small
        if self.asked.square:
            return True
        return self.asked.shapes(small | {"hidden": small["hidden"] + 2}) is None


def descriptions(proposal: Proposal, ways: Mapping[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Possible descriptions, most likely first.

    Each comes without and with a factor on embeddings, the square root of their width.
    """
    for chosen in _choices(ways):
        yield proposal.description(chosen)
        yield proposal.description(chosen, rooted=True)


def _count(axis: str) -> int:
    words = {word: count for count, word in NUMBERS.items()}
    return words[axis] if axis in words else int(axis.rpartition("_")[2])


def _choices(ways: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Combinations of patterns; tensors with the same alternatives, as weight and bias, agree."""
    groups = {_group(found): len(found) for found in ways.values() if len(found) > 1}
    for chosen in product(*(range(count) for count in groups.values())):
        at = dict(zip(groups, chosen, strict=True))
        yield {name: found[at.get(_group(found), 0)] for name, found in ways.items()}


def _group(found: list[str]) -> tuple[str, ...]:
    """The side on which the possible patterns of a tensor differ: reading or writing."""
    sides = [re.split(r" (?:<-|->) ", each) for each in found]
    parts = [{each[at] for each in sides} for at in range(len(sides[0]))]
    at = next((at for at, part in enumerate(parts) if len(part) > 1), 0)
    return tuple(each[at] for each in sides)


def _stored_names(asked: ModelClass) -> dict[str, str]:
    """Map the class's tensor names to names in files, matched by equal values.

    Raises:
        InputError: files have a tensor that the class does not have.
    """
    with temporary("inference") as folder:
        model: Any = asked.small_model()
        with quiet():
            model.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
    here = model.state_dict()
    found = {}
    for name, tensor in stored.items():
        same = (each for each, of in here.items() if each not in stored and tensor.equal(of))
        own = name if name in here else next(same, None)
        if own is None:
            raise not_inferred(
                f"files of a {asked.name} model have tensor {name}, which its class makes others of"
            )
        found[own] = name
    return found
