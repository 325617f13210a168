"""Find which layers have a tensor, and which config keys decide that.

The class builds models with more layers, and with other values of every key that changes which
layers have which tensors. A condition is accepted if it holds in all of these models.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations, permutations
from operator import and_
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.extras.family_inference.classes import ModelClass
from growkit.model.families.config_keys import PERIODS
from growkit.model.families.expressions import LAYER, parse_expression

MOST = 3
"""Maximum number of parts of a condition."""

Layers = frozenset[int]
Kind = frozenset[tuple[str, tuple[int, ...]]]
"""The tensors of a layer: their names with ``{layer}``, and their shapes."""


@dataclass(frozen=True)
class Asked:
    """A model that the class was asked to build.

    Attributes:
        config: its config, as the class resolves it.
        kinds: the kind of every layer.
    """

    config: Config
    kinds: Sequence[Kind]

    @property
    def layers(self) -> Layers:
        """The numbers of its layers."""
        return frozenset(range(len(self.kinds)))

    @property
    def alike(self) -> set[tuple[str, Layers]]:
        """Every tensor with one of its shapes, and the layers where it has that shape."""
        every = frozenset().union(*self.kinds)
        return {
            (tensor[0], frozenset(at for at, kind in enumerate(self.kinds) if tensor in kind))
            for tensor in every
        }

    def having(self, template: str) -> Layers:
        """The layers that have a tensor."""
        return frozenset(
            at for at, kind in enumerate(self.kinds) if any(name == template for name, _ in kind)
        )

    def shapes(self, template: str, layers: Iterable[int]) -> set[tuple[int, ...]]:
        """The shapes that a tensor has in some layers."""
        return {shape for at in layers for name, shape in self.kinds[at] if name == template}


class Conditions:
    """Conditions on layers.

    Args:
        asked: the class.

    Attributes:
        deciding: keys with a number, or a list of layer numbers, that decide which tensors some
            layers have.
    """

    def __init__(self, asked: ModelClass) -> None:
        self._asked = asked
        few, numbers = asked.small_layers, asked.numbers
        periods = [value for key, value in numbers.items() if PERIODS.search(key)]
        many = 2 * max(few, *(value for value in periods if value <= asked.layers), 0)
        self.deciding: list[str] = []
        self._models = [model for count in (few, many) if (model := self._ask({}, count))]
        self._unchanged = len(self._models)
        more = self._models[-1]
        numbers = {key: asked.value(key) for key in _numbers(asked, many)}
        listed = asked.listed
        if len({*more.kinds}) > 1 or listed:
            self._vary(numbers, many, lambda value: (value + 1, value - 1))
            self._vary(listed, many, lambda value: (value[:-1], [*value, many - 1]))
            self._vary(asked.lists, many, lambda value: (([*value[1:], value[0]] * many)[:many],))
        self._lists = [*asked.lists]
        self._rest = self._possible(numbers, listed)
        self._known: list[tuple[str, list[Layers]]] = []

    def _ask(self, changes: Mapping[str, Any], count: int) -> Asked | None:
        shapes = self._asked.shapes(changes, count)
        if shapes is None:
            return None
        kinds: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in range(count)]
        for name, shape in shapes.items():
            if (layer := self._asked.layer_of(name)) is not None:
                kinds[layer].add((self._asked.template(name), shape))
        config = self._asked.config(changes, count).to_dict()
        return Asked(config, [frozenset(kind) for kind in kinds])

    def _vary(self, keys: Mapping[str, Any], count: int, others: Any) -> None:
        """Build models with other values of keys, and keep those whose layers differ."""
        as_it_is = self._models[-1 if len(self._models) < 3 else 1]
        for key, value in keys.items():
            varied = (self._ask({key: other}, count) for other in others(value))
            different = [model for model in varied if model and model.alike != as_it_is.alike]
            if different:
                self.deciding.append(key)
                self._models += different

    def of(self, template: str, layers: Layers) -> str | None:
        """The condition for layers in which a tensor is as it is in some layers of the small model.

        None if that is true of all layers, in deeper models too.

        Args:
            template: name of the tensor, with ``{layer}``.
            layers: those of the small model.
        """
        wanted = [self._like(model, template, layers) for model in self._models]
        known = [at for at, layers in enumerate(wanted) if layers is not None]
        # If no condition holds in all models, one for deeper models of this config must do.
        for models in (known, [at for at in known if at < self._unchanged]):
            condition = self._said(models, [wanted[at] or frozenset() for at in models])
            if condition != "":
                return condition
        return " or ".join(f"layer == {layer}" for layer in sorted(layers))

    def _said(self, known: Sequence[int], mine: Sequence[Layers]) -> str | None:
        """A condition that holds in exactly these layers of some models; "" if there is none."""
        every = [self._models[at].layers for at in known]
        if [*mine] == every:
            return None
        rest = [layers - own for layers, own in zip(every, mine, strict=True)]
        for count in range(1, MOST + 1):
            for target, form in ((mine, "{}"), (rest, "not ({})")):
                possible = chain(self._entries(known, target), self._parts())
                bits = ((text, self._bits(its[at] for at in known)) for text, its in possible)
                wanted = self._bits(target)
                parts = ((text, its) for text, its in bits if its & wanted == wanted)
                # ``combinations`` would evaluate all parts first.
                every_choice = (
                    ((part,) for part in parts) if count == 1 else combinations(parts, count)
                )
                for chosen in every_choice:
                    if reduce(and_, (its for _, its in chosen)) == wanted:
                        return form.format(" and ".join(text for text, _ in chosen))
        return ""

    def _bits(self, layers: Iterable[Layers]) -> int:
        """A number with one bit for each layer of each model: intersecting numbers is quick."""
        width = max(len(model.kinds) for model in self._models)
        return sum(
            1 << (at * width + layer) for at, in_model in enumerate(layers) for layer in in_model
        )

    def _like(self, model: Asked, template: str, layers: Layers) -> Layers | None:
        """The layers of a model in which a tensor is as in some layers of the small model.

        Layers of the same kind have the same tensor, except perhaps the last layer. None if the
        model has kinds of layers that the small model lacks.
        """
        small, having = self._models[0], model.having(template)
        others = small.having(template) - layers
        if not others:
            return having
        its, theirs = small.shapes(template, layers), small.shapes(template, others)
        if not its & theirs and model.shapes(template, having) <= its | theirs:
            return frozenset(at for at in having if model.shapes(template, {at}) <= its)
        mine = {small.kinds[layer] for layer in layers}
        if mine & {small.kinds[layer] for layer in others}:
            last = frozenset({len(model.kinds) - 1})
            return having & last if layers == {len(small.kinds) - 1} else having - last
        if any(model.kinds[layer] not in small.kinds for layer in having):
            return None
        return frozenset(layer for layer in having if model.kinds[layer] in mine)

    def arranged(self, condition: str) -> dict[str, Any]:
        """How the keys of a condition change when layers are rearranged, where a rule is known."""
        if "%" in condition:
            return self._explicit(condition)
        rules: dict[str, Any] = {}
        every = self._asked.layers_key
        for key in self.deciding:
            for sign, rule in (
                ("in|not in", {"layers": f"layer in {key}"}),
                ("<|>=", {"count": f"layer < {key}"}),
                ("<=|>", {"last": f"layer <= {key}"}),
                (f"(?:<|>=) {every} -", {"count": f"layer >= {every} - {key}"}),
            ):
                if re.search(rf"layer (?:{sign}) {key}\b", condition):
                    rules[key] = rule
        return rules

    def _explicit(self, condition: str) -> dict[str, Any]:
        """Replace a period and its listed exceptions by a list of layers and a period of 1."""
        parts = re.fullmatch(
            r"(?:not \()?layer not in (?P<key>\w+) and \(layer \+ 1\) % (?P<period>\w+) == 0\)?",
            condition,
        )
        if parts is None:
            return {}
        every = condition.removeprefix("not (").removesuffix(")")
        return {parts["key"]: {"layers": f"not ({every})"}, parts["period"]: 1}

    def _entries(
        self, known: Sequence[int], wanted: Sequence[Layers]
    ) -> Iterator[tuple[str, list[Layers]]]:
        """Conditions on lists with one entry per layer."""
        for key in self._lists:
            lists = [
                entries for m in self._models if isinstance(entries := m.config.get(key), list)
            ]
            if len(lists) < len(self._models):
                continue
            pairs = [(lists[at], chosen) for at, chosen in zip(known, wanted, strict=True)]
            values = {row[layer] for row, chosen in pairs for layer in chosen if layer < len(row)}
            if values and all(isinstance(value, str | int) for value in values):
                text = " or ".join(f"{key}[layer] == {v!r}" for v in sorted(values, key=str))
                having = [
                    frozenset(at for at, value in enumerate(row) if value in values)
                    for row in lists
                ]
                yield (text if len(values) == 1 else f"({text})"), having

    def _possible(self, numbers: Iterable[str], listed: Iterable[str]) -> Iterator[str]:
        """Possible parts of a condition, most likely first."""
        deciding = [key for key in numbers if key in self.deciding]
        every = self._asked.layers_key
        for key in listed:
            if key in self.deciding:
                yield from (f"layer in {key}", f"layer not in {key}")
        for key in deciding:
            yield from (f"layer {sign} {key}" for sign in ("<", ">=", "<=", ">"))
            yield from (f"layer {sign} {every} - {key}" for sign in ("<", ">="))
            for at in ("layer", "(layer + 1)"):
                yield from (f"{at} % {key} {sign} 0" for sign in ("==", "!="))
        for period, offset in permutations(deciding, 2):
            yield from (f"layer % {period} {sign} {offset}" for sign in ("==", "!="))
        few = self._asked.small_layers
        for number in [*map(str, range(few)), f"{every} - 1"]:
            yield from (f"layer {sign} {number}" for sign in ("==", "!=", ">"))
        for steps in range(2, 2 * few):
            yield from (f"layer % {steps} == {rest}" for rest in range(steps))
        for steps in range(3, 2 * few):
            yield from (f"layer % {steps} != {rest}" for rest in range(steps))

    def _parts(self) -> Iterator[tuple[str, list[Layers]]]:
        """Possible parts of a condition, with the layers in which each holds, by model.

        There are thousands, most likely first, so each is evaluated only when it is needed.
        """
        yield from self._known
        for text in self._rest:
            with suppress(InputError):  # one of its keys has no value in some model
                self._known.append((text, self._holding(text)))
                yield self._known[-1]

    def _holding(self, text: str) -> list[Layers]:
        """The layers in which a condition holds, by model."""
        numbers = range(max(len(model.kinds) for model in self._models))
        condition = parse_expression(text, text, {*self._models[0].config, LAYER}, {})
        its: dict[str, Layers] = {}  # most models have the same values of its keys
        for model in self._models:
            if (shown := condition.shown(model.config)) not in its:
                its[shown] = frozenset(at for at in numbers if condition.holds(model.config, at))
        return [its[condition.shown(model.config)] & model.layers for model in self._models]


def _numbers(asked: ModelClass, layers: int) -> list[str]:
    """Keys whose number may be a layer's number or a number of layers."""
    sizes = {key for keys in asked.sizes.values() for key in keys} | {asked.layers_key}
    return [
        key
        for key, value in asked.numbers.items()
        if 0 <= value <= 4 * layers and key not in sizes and not key.endswith("_token_id")
    ]
