"""Descriptions of families in YAML: those of this package, and those of users.

::

    family: My model
    model_type: mine
    extends: decoder
    sizes: {num_experts: experts}
    assumed: {head_dim: 128, first_dense_layers: 0, layer_types: {each_layer: window(layer % 4)}}
    conditions: {sparse: layer >= first_dense_layers}
    tensors:
      model.layers.{layer}.self_attn.q_proj.weight: {bias: true}
      model.layers.{layer}.mlp.gate.weight: {pattern: experts <- hidden, when: sparse}
      ...

Patterns are those of ``growkit.base.axes``, conditions those of
``growkit.model.families.expressions``. A family that extends another one states only the
differences; null removes an inherited entry. ``growkit inspect --infer`` writes such a file.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from growkit.base.axes import ORDERS, PLACES, Axis, Order, Pattern, Role
from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.base.parsing import check_kind
from growkit.base.tensors import Config
from growkit.model.families import family_parts, own_code
from growkit.model.families.expressions import LAYER, Expression, parse_expression
from growkit.model.families.family_parts import (
    NEW,
    DiffForm,
    Experts,
    Multiple,
    Norm,
    Tensor,
    Without,
)

NEEDED = ("family", "model_type", "sizes", "tensors")

NOT_INHERITED = (
    *("family", "model_type", "published_as", "architecture", "loads_with"),
    *("form", "former", "upgrades"),
)
"""Keys that are not inherited."""

NEEDED_AXES = ("layers", "vocab", "hidden")

IN_CODE = re.compile(r'^DESCRIPTION = """$(.*?)^"""$', re.MULTILINE | re.DOTALL)
"""The description in a model's file (``growkit.model.families.own_code``)."""

NAME = re.compile(r"[\w.\-]{1,200}")
TIED = "tie_word_embeddings"

TIED_TO_NO_NORM = (
    "cannot grow: its head is tied to the embedding, and the norm before it has no weight that "
    "could take back what the head reads more than once; give it a head of its own with --untie, "
    "or write the embedding as lm_head.weight and set tie_word_embeddings to false"
)
"""Why hidden cannot grow where a tied head follows no norm with a weight."""


def shipped() -> dict[str, Path]:
    """The files with the descriptions in the package and its extras, by name.

    They are NAME.yaml, or modeling_NAME.py (``growkit.model.families.own_code``).
    """
    return _files(tuple(own_code.folders()))


@cache
def _files(folders: tuple[Path, ...]) -> dict[str, Path]:
    files = {file.stem: file for folder in folders for file in sorted(folder.rglob("*.yaml"))}
    code = own_code.modeling_files().items()
    return files | {name: file for name, file in code if shipped_text(file)}


@cache
def shipped_text(file: Path) -> str:
    """The text of a description of this package, which begins with an empty line.

    It is empty for a model's file whose family another file describes.
    """
    text = file.read_text("utf-8")
    if file.suffix == ".py":
        described = IN_CODE.search(text)
        return described[1] if described else ""
    return f"\n{text}"


@cache
def read_shipped(file: Path) -> dict[str, Any]:
    """Read a description of this package, with inherited entries filled in."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
    return extended(yaml.load(shipped_text(file), loader), str(file))  # noqa: S506


def extended(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fill in the entries that a description inherits.

    Raises:
        InputError: there is no description of that name.
    """
    base = content.get("extends")
    if base is None:
        return dict(content)
    files = shipped()
    _check_known(str(base), files, f"{where} extends {base!r}")
    inherited = {k: v for k, v in read_shipped(files[str(base)]).items() if k not in NOT_INHERITED}
    tensors = {
        name: {"pattern": entry} if isinstance(entry, str) else entry
        for name, entry in inherited["tensors"].items()
    }
    own = {key: value for key, value in content.items() if key != "extends"}
    return _merged(inherited | {"tensors": tensors}, own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        if value is None and key in base:
            del merged[key]
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            merged[key] = _merged(base[key], value)
        else:
            merged[key] = value
    return merged


def read_description(content: Any, where: str) -> dict[str, Any]:
    """Read a description into the fields of its family.

    Args:
        content: content of the YAML file.
        where: name of the description in messages.

    Raises:
        InputError: the description is invalid; the message names the key or tensor.
    """
    if not isinstance(content, Mapping):
        raise InputError(f"{where} must be a mapping with {', '.join(NEEDED)}")
    content = extended(content, where)
    check_kind(content, family_parts.KEYS, where)
    for key in NEEDED:
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a family needs {', '.join(NEEDED)}")
    return _Description(content, where).fields()


class _Description:
    """A description, and the names used in it."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content, self._get, self._where = content, content.get, where
        sizes = content["sizes"].items()
        self._sizes = {key: [_axes(way) for way in _listed(entry)] for key, entry in sizes}
        summed = [axis for ways in self._sizes.values() for axes in ways for axis in axes]
        self._axes = {*summed, *content.get("constants", {}), *content.get("same", {})}
        self._layers = next((key for key, entry in sizes if entry == "layers"), "")
        for axis in NEEDED_AXES:
            if axis not in self._axes or not self._layers:
                raise InputError(
                    f"sizes in {where} have no key for {axis}, which every family needs"
                )
        self._assumed = content.get("assumed", {})
        self._keys = {*self._sizes, *self._assumed, TIED, LAYER}
        self._named: dict[str, Expression] = {}
        for name, text in content.get("conditions", {}).items():
            self._named[name] = self._condition(text, f"condition {name}")
        self._tied = content.get("tied", {})

    def fields(self) -> dict[str, Any]:
        """Arguments of ``Family``."""
        content, get = self._content, self._get
        tensors = self._tensors(content["tensors"])
        forms = [_merged(content["tensors"], form) for form in get("other_forms", ())]
        for form in forms:
            check_kind(form, family_parts.KEYS["tensors"], f"other_forms in {self._where}")
        names = {name for form in (content["tensors"], *forms) for name in form}
        for tied in (*self._tied.values(), *self._tied):
            _check_known(tied, names, f"tied in {self._where} names {tied!r}")
        served, ratios = self._served(), self._ratios()
        of_others = [axis for over, under in ratios.values() for axis in (*over, under)]
        for axis in (*of_others, *get("kinds", {}), *get("same", {}).values()):
            self._check_axis(axis, self._where)
        norms = tuple(self._norm(norm, "norms") for norm in get("norms", ()))
        numbered = get("numbered")
        return {
            **{key: get(key) for key in ("architecture", "loads_with")},
            **{key: get(key, {}) for key in ("same", "constants", "aliases", "former", "kinds")},
            "published_as": get("published_as", {}),
            "name": content["family"][:100],
            "model_types": tuple(_listed(content["model_type"])),
            "axes": self._axes_by_key(),
            "defaults": {key: self._default(key, value) for key, value in self._assumed.items()},
            "derived": frozenset(get("computed", ())),
            "may_be_zero": frozenset(get("may_be_zero", ())),
            "ratios": ratios,
            "per_layer": frozenset(get("per_layer", ())),
            "places": {
                axis: _one_of(PLACES, name, f"places of {axis} in {self._where}")
                for axis, name in get("places", {}).items()
            },
            "grouped": frozenset(served).union(*served.values()),
            "served": {axis: serving for axis, serving in served.items() if serving},
            "multiples": tuple(self._multiples()),
            "check": self._check((*norms, *(tensor.norm for tensor in tensors if tensor.norm))),
            "lists": family_parts.LISTS.union(get("lists", ())),
            "arranged": self._arranged(),
            "numbered": lambda config: numbered if numbered and config.get(numbered) else None,
            "normed_sums": self._condition(get("normed_sums", False), "normed_sums").holds,
            "fixed": self._fixed(tensors),
            "norms": norms,
            "recomputed": tuple(get("recomputed", ("rotary_emb.inv_freq",))),
            "duplicates": self._tied,
            "tensors": tensors,
            "other_forms": tuple(self._tensors(form) for form in forms),
            "form": self._form(),
            "experts": self._experts(),
            "upgrades": {to: self._without(said) for to, said in get("upgrades", {}).items()},
        }

    # Configs.

    def _served(self) -> dict[str, tuple[str, ...]]:
        """The axes of groups, each with those that it serves."""
        served = {axis: tuple(_listed(by)) for axis, by in self._get("groups", {}).items()}
        for axis in frozenset(served).union(*served.values()):
            self._check_axis(axis, self._where)
        try:
            TopologicalSorter(served).prepare()
        except CycleError as error:
            raise InputError(
                f"groups in {self._where} go in a circle ({', '.join(error.args[1])}); no axis can "
                "serve itself"
            ) from None
        return served

    def _ratios(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """The keys of ratios, each with the axes of the product and of the divisor."""
        return {
            key: (tuple(over.split(".")), under)
            for key, text in self._get("ratios", {}).items()
            for over, _, under in [text.partition(" / ")]
        }

    def _axes_by_key(self) -> dict[str, Any]:
        """The axes of every size, or a function that chooses them; single axes come first."""
        by_key: dict[str, Any] = {}
        for key, ways in sorted(
            self._sizes.items(), key=lambda pair: max(map(len, pair[1]), default=0)
        ):
            entry = self._content["sizes"][key]
            if isinstance(entry, str):
                (by_key[key],) = ways
            else:
                when = [self._condition(condition, f"size {key}") for condition in entry.values()]
                by_key[key] = partial(_first, list(zip(when, ways, strict=True)))
        return by_key

    def _default(self, key: str, value: Any) -> Any:
        """A value, or a function of the config."""
        what = f"assumed {key}"
        if isinstance(value, Mapping) and value.keys() == {"each_layer"}:
            check_kind(value, family_parts.TEXTS, f"{what} in {self._where}")
            entry = self._expression(value["each_layer"], what)
            count = self._layers
            return lambda config: [entry(config, layer) for layer in range(config[count])]
        if isinstance(value, str) and (" " in value or value in self._keys):
            return self._expression(value, what)
        return value

    def _multiples(self) -> Iterator[Multiple]:
        numbers = {*self._keys, *self._axes} - {LAYER}
        for what, said in each_entry(self._get("multiples", {}), "of"):
            for number in (what, said.get("of", "")):
                _check_known(number, numbers, f"multiples in {self._where} name {number!r}")
            yield Multiple(what, said["of"], said.get("why", "according to its description"))
        for axis, serving in self._get("groups", {}).items():
            for serving_axis in _listed(serving):
                yield Multiple(axis, serving_axis, "because each of these serves a whole group")

    def _check(self, norms: Sequence[Norm]) -> Callable[[Config], None]:
        """Make the check for other errors in a config."""
        name = self._content["family"]
        keys = {norm.eps for norm in norms if norm.eps}
        needs = [
            (self._condition(text, "needs"), why) for text, why in self._get("needs", {}).items()
        ]

        one = family_parts.one_model(name)

        def check(config: Config) -> None:
            for key in keys:
                value = config.get(key)
                if not isinstance(value, float | int) or isinstance(value, bool):
                    raise InputError(
                        f"config.json of {one} has {key} {value!r}, which a norm of its "
                        f"description adds to a mean; say it there, or under assumed"
                    )
            for condition, why in needs:
                if not condition.holds(config):
                    has = condition.shown(config)
                    raise InputError(f"config.json of {one} has {has}: {why}")

        return check

    # Layers.

    def _arranged(self) -> Callable[[Config, Sequence[int]], Config]:
        rules: dict[str, tuple[str, Expression]] = {}
        values: dict[str, Any] = {}
        for key, entry in self._get("arranged", {}).items():
            if isinstance(entry, Mapping) and len(entry) == 1:
                what = f"arranged {key}"
                check_kind(entry, family_parts.ARRANGED, f"{what} in {self._where}")
                ((way, text),) = entry.items()
                rules[key] = way, self._condition(text, what)
            else:
                values[key] = entry

        def arranged(config: Config, layers: Sequence[int]) -> Config:
            entries, deeper = dict(values), {**config, self._layers: len(layers)}
            same = True
            for key, (way, condition) in rules.items():
                kinds = [condition.holds(config, layer) for layer in layers]
                same &= kinds == [condition.holds(deeper, place) for place in range(len(layers))]
                wanted = [place for place, is_one in enumerate(kinds) if is_one]
                of_way = {"layers": wanted, "count": len(wanted), "last": max(wanted, default=-1)}
                entries[key] = of_way[way]
            return {} if same else entries

        return arranged

    def _fixed(self, tensors: Sequence[Tensor]) -> Callable[[Config], Mapping[str, str]]:
        stated = []
        for axis, said in each_entry(self._get("fixed", {}), "why"):
            self._check_axis(axis, self._where)
            when = self._condition(said.get("when", True), f"fixed {axis}")
            stated.append((axis, when, said.get("why", "cannot grow")))
        embeddings, layers = {*self._tied.values()}, self._layers

        def fixed(config: Config) -> Mapping[str, str]:
            reasons = {axis: why for axis, when, why in stated if when.holds(config)}
            present = [tensor for tensor in tensors if tensor.when(config)]
            last = config[layers] - 1
            reads = any(t.pattern == "<- hidden" and t.in_layer(config, last) for t in present)
            tied = config.get(TIED) and any(
                t.name in embeddings and t.pattern.endswith("-> hidden") for t in present
            )
            return {"hidden": TIED_TO_NO_NORM} | reasons if tied and not reads else reasons

        return fixed

    # Tensors.

    def _tensors(self, content: Mapping[str, Any]) -> tuple[Tensor, ...]:
        for name in content:
            as_layer = re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1)
            if as_layer != name and as_layer in content:
                raise InputError(
                    f"{self._where} has tensor {name} twice: {as_layer} describes it as well"
                )
        entries = [(name, self._entry(name, said)) for name, said in each_entry(content, "pattern")]
        embeddings = [entry for name, entry in entries if name in self._tied.values()]
        powers: Mapping[str, float] = next((e["powers"] for e in embeddings if "powers" in e), {})
        return _with_idle(
            [tensor for name, entry in entries for tensor in self._variants(name, entry, powers)]
        )

    def _variants(
        self, name: str, entry: dict[str, Any], embedding: Mapping[str, float]
    ) -> Iterator[Tensor]:
        """The tensor in tied models and in untied ones, each with its bias."""
        of, powers = f"tensor {name}", entry.get("powers", {})
        conditions = (self._condition(entry["when"], of),) if "when" in entry else ()
        untied = self._expression(f"not {TIED}", of)
        dense = entry.get("dense")
        tensor = Tensor(
            name,
            entry["pattern"],
            (*conditions, untied) if name in self._tied or "tied" in entry else conditions,
            canonical=entry.get("canonical"),
            order=self._order(entry, name),
            norm=self._norm(entry, name) if "norm" in entry else None,
            scale=partial(_product, powers) if powers else None,
            idle=entry.get("idle"),
            diagonal=entry.get("diagonal"),
            start=entry.get("start"),
            offset=entry.get("offset", 0.0),
            indices=entry.get("indices", False),
            component=entry.get("component"),
            dense=NEW if dense == "new" else dense and tuple(_listed(dense)),
        )
        variants = [tensor]
        if "tied" in entry:
            # A tied head reads the embedding as it is stored, without the factor of the class.
            stored = {
                axis: powers.get(axis, 0) - embedding.get(axis, 0) for axis in {*powers, *embedding}
            }
            tied = replace(
                tensor,
                pattern=entry["tied"],
                conditions=(*conditions, self._expression(TIED, of)),
                scale=partial(_product, stored) if stored else None,
            )
            variants = [tied, tensor]
        for variant in variants:
            yield variant
            if "bias" in entry:
                biased = self._condition(entry["bias"], f"bias of {name}")
                yield replace(
                    variant,
                    name=_bias(name),
                    pattern=_written(variant.pattern),
                    conditions=(*variant.conditions, biased),
                    norm=None,
                    idle=tensor.idle and 0.0,
                    scale=None,
                    offset=0.0,
                    dense=tensor.dense and tuple(map(_bias, tensor.dense)),
                )

    def _entry(self, name: str, said: Any) -> dict[str, Any]:
        """Read the entry of a tensor.

        Raises:
            InputError: the entry is invalid.
        """
        of = f"tensor {name}"
        plain = name.replace("{layer}", "0", 1)
        for placeholder in family_parts.COUNTED:
            plain = plain.replace(f"{{{placeholder}}}", "0", 1)
        if not NAME.fullmatch(plain):
            raise InputError(
                f"{of} in {self._where} has a name that no tensor has; {{layer}} may occur in it "
                f"once, and likewise {{{'}, {'.join(family_parts.COUNTED)}}}"
            )
        if "pattern" not in said:
            raise InputError(f"{of} in {self._where} must be a pattern, or a mapping with one")
        for key in ("pattern", "tied"):
            if key in said:
                self._check_pattern(said[key], f"{of} in {self._where}")
        for axis in said.get("powers", ()):
            self._check_axis(axis, f"{of} in {self._where}")
        if isinstance(start := said.get("start"), str):
            _check_known(start, family_parts.STARTS, f"start of {of} in {self._where} is {start!r}")
        return dict(said)

    def _norm(self, entry: Mapping[str, Any], of: str) -> Norm:
        said = {key: entry[key] for key in family_parts.NORM if key in entry}
        over = said.pop("norm", "")
        self._check_axis(over, f"{of} in {self._where}")
        return Norm(over, said.pop("eps", None), **said)

    def _order(self, entry: Mapping[str, Any], of: str) -> Order | None:
        if not entry.get("order"):
            return None
        what = f"order of {of} in {self._where}"
        name, *axes = entry["order"]
        for axis in axes:
            self._check_axis(axis, what)
        try:
            order: Order = _one_of(ORDERS, name, what)(*axes)
        except TypeError:
            raise InputError(f"{what} is {entry['order']}; {name} needs other axes") from None
        return order

    def _check_pattern(self, pattern: str, of: str) -> None:
        try:
            parsed = Pattern.parse(pattern.replace("_{layer}", ""))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{of}: {error}") from None
        for number, dimension in enumerate(parsed.dimensions):
            for axis in dimension.axes:
                self._check_axis(axis, of)
            if "vocab" in dimension.axes and (number or dimension.form != Axis("vocab")):
                raise InputError(
                    f"{of} is {pattern!r}; vocab can only be the first dimension, alone"
                )

    # What its models can become.

    def _form(self) -> DiffForm | None:
        said = self._get("form")
        if said is None:
            return None
        fields = {"switches": {}} | said
        fields["harmless"] = {key: tuple(keys) for key, keys in said.get("harmless", {}).items()}
        if "lambda_init" in said:
            what = f"lambda_init in {self._where}"
            lambda_init = parse_expression(said["lambda_init"], what, {LAYER}, {})
            fields["lambda_init"] = lambda layer: lambda_init.value({}, layer)
        return DiffForm(**fields)

    def _experts(self) -> Experts | None:
        said = self._get("experts")
        if said is None:
            return None
        what = f"experts in {self._where}"
        self._check_axis(said.get("width", ""), what)
        sizes = {
            axis: parse_expression(text, what, ("width", "pieces"), {})
            for axis, text in said.get("sizes", {}).items()
        }
        dense = self._without(said.get("dense", {}))
        fields = said | {"dense": dense, "groups": tuple(said.get("groups", ()))}
        fields["alone"] = self._condition(said.get("alone", False), "experts").holds
        fields["sizes"] = lambda width, pieces: {
            axis: expression.value({"width": width, "pieces": pieces})
            for axis, expression in sizes.items()
        }
        return Experts(**fields)

    def _without(self, said: Mapping[str, Any]) -> dict[str, Without]:
        """By ``model_type``."""
        by_kind = {}
        for kind, entry in said.items():
            only = {key: tuple(values) for key, values in entry.get("only", {}).items()}
            when = self._condition(entry.get("when", True), kind).holds
            by_kind[kind] = Without(**entry | {"only": only, "when": when})
        return by_kind

    # Parts of a description.

    def _expression(self, text: str, of: str) -> Expression:
        return parse_expression(text, f"{of} in {self._where}", self._keys, self._named)

    def _condition(self, said: str | bool, of: str) -> Expression:
        return self._expression(str(said), of)

    def _check_axis(self, axis: str, of: str) -> None:
        _check_known(axis, self._axes, f"{of} names axis {axis!r}, which no size gives")


def _check_known(name: str, known: Collection[str], problem: str) -> None:
    """Refuse an unknown name; the message ends with the nearest known one."""
    if name not in known:
        raise InputError(f"{problem}; {did_you_mean(name, sorted(known))}")


def _one_of(known: Mapping[str, Any], name: str, what: str) -> Any:
    _check_known(name, known, f"{what} is {name!r}")
    return known[name]


def each_entry(content: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping: a name may have several, and text is the value of their key."""
    for name, several in content.items():
        for entry in several if isinstance(several, list) else [several]:
            yield name, {key: entry} if isinstance(entry, str) else entry


def _listed(entry: Any) -> list[Any]:
    """The members of a list or mapping; a single text is one."""
    return [entry] if isinstance(entry, str) else list(entry)


def _axes(text: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in text.split("+"))


def _first(ways: Sequence[tuple[Expression, Any]], config: Config) -> tuple[str, ...]:
    """The axes of a size whose condition is met."""
    return next((axes for when, axes in ways if when.holds(config)), ())


def _bias(name: str) -> str:
    return name.removesuffix(".weight") + ".bias"


def _written(pattern: str) -> str:
    """The written axes of a matrix's pattern; the whole pattern of a vector."""
    return pattern.partition(" -> ")[2] or pattern.partition(" <- ")[0]


def _with_idle(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Zero for all that writes hidden states in layers, unless a tensor has its own ``idle``."""
    if any(tensor.idle is not None for tensor in tensors):
        return tuple(tensors)
    norms = {module_of(tensor.name) for tensor in tensors if tensor.norm}
    return tuple(
        replace(tensor, idle=0.0)
        if "{layer}" in tensor.name and writes_hidden(tensor.name, tensor.pattern, norms)
        else tensor
        for tensor in tensors
    )


def module_of(tensor: str) -> str:
    """The module of a tensor, by their names."""
    return tensor.rpartition(".")[0]


def writes_hidden(tensor: str, pattern: str, norms: Collection[str]) -> bool:
    """Whether a tensor writes hidden states, and is no part of one of these norms."""
    dimensions = Pattern.parse(pattern.replace("_{layer}", "")).dimensions
    writes = any(
        dimension.role is Role.WRITTEN and dimension.axes == {"hidden"} for dimension in dimensions
    )
    return writes and module_of(tensor) not in norms


def _product(powers: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    return math.prod(math.sqrt(sizes[axis]) ** round(2 * power) for axis, power in powers.items())
