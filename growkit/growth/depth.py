"""Growth in depth: new layers that change nothing at first, or layers that are repeated.

Identity blocks, Wu et al., "LLaMA Pro: Progressive LLaMA with Block Expansion", arXiv 2401.02415: a
new layer is a copy of the one before it whose output is zero. The zeros get a gradient at once, the
rest of the layer after the first step.

Stacks, Du et al., "Stacking Your Transformers", arXiv 2405.15319, stacks that overlap, Kim et al.,
"SOLAR 10.7B", arXiv 2312.15166, and layers next to copies of themselves are another function.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from growkit.base.errors import InputError
from growkit.base.tensors import Config, Weights
from growkit.families.description import MOST_LAYERS, Member
from growkit.families.family import Family, stored_family
from growkit.planning.operation import Change, Operation, Option, SizeOption
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Constant, Kept, Transform

PLACES = ("even", "end")


def _is_place(text: str) -> bool:
    return text in PLACES or bool(re.fullmatch(r"[0-9]{1,5}( *, *[0-9]{1,5})*", text))


LAYERS = SizeOption("layers", "the number of layers; x1.5 turns 2 into 3", axes=("layers",))
OPTIONS: tuple[Option, ...] = (
    LAYERS,
    Option(
        "blocks",
        "what new layers do: nothing at first (identity); repeat the whole model on top (stack) or "
        "without its middle (overlap); or repeat the layer before them (interpose)",
        ("identity", "stack", "overlap", "interpose"),
    ),
    Option(
        "place",
        "where new layers of identity and interpose go: evenly between the others (even), after "
        "them (end), or after these, counted from 0, each as often as it is named",
        form="even|end|N,N,…",
        accepts=_is_place,
    ),
)


@dataclass(frozen=True)
class Layer:
    """A layer of the target.

    Attributes:
        of: number of the source's layer whose tensors it has.
        idle: whether its outputs are zero.
    """

    of: int
    idle: bool = False


class Depth(Operation):
    """See ``growkit.planning.operation.Operation``."""

    name = "depth"
    paper = (
        "https://arxiv.org/abs/2401.02415 (identity), https://arxiv.org/abs/2405.15319 (stack), "
        "https://arxiv.org/abs/2312.15166 (overlap)"
    )
    options = OPTIONS

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """Whether λ_init of every layer stays what it is, where a class counts layers for it."""
        lambda_init = family.form.lambda_init if family.form else None
        order = enumerate(arrangement(family.sizes(config)["layers"], options))
        return lambda_init is None or all(
            layer.idle or lambda_init(layer.of) == lambda_init(place) for place, layer in order
        )

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family = stored_family(source)
        unused = unused_tensors(source, family)
        order = arrangement(family.sizes(source.config)["layers"], options)
        _check(family, family.complete(source.config), order, source.where())
        config = family.relayered(source.config, [layer.of for layer in order], source.where())
        if options["blocks"] == "identity" and options.get("place", PLACES[0]) in PLACES:
            order = _fitted(family, source.config, config, order)
            config = family.relayered(source.config, [layer.of for layer in order], source.where())
        family.check_bounds(config, "the deeper model")
        made = _transforms(family, source, config, order)
        layers = tuple(None if layer.idle else layer.of for layer in order)
        plan = Plan.checked(source, family, config, made, unused=unused, layers=layers)
        settled = {"blocks": options["blocks"]}
        if options["blocks"] in ("identity", "interpose"):
            settled["place"] = options.get("place", PLACES[0])
        if options["blocks"] == "identity":
            return Change([plan], settled=settled)
        return Change([plan], "different", "layers are computed more than once", settled)


def arrangement(count: int, options: Mapping[str, str]) -> list[Layer]:
    """The layers of the target, in order.

    Args:
        count: number of layers of the source.
        options: of the method.

    Raises:
        InputError: there is no such order; lists those that exist.
    """
    blocks, place = options["blocks"], options.get("place")
    if blocks in ("stack", "overlap"):
        if place is not None:
            raise InputError(
                f"place is {place!r}, but {blocks} decides where they go; leave it out"
            )
        new = _new(count, options.get("layers"))
        if blocks == "stack" and new % count == 0:
            return [Layer(of) for of in [*range(count)] * (1 + new // count)]
        if blocks == "overlap" and new <= count:
            # The first layers and the last ones, so many of each that those between come twice.
            last = (count + new) // 2
            return [Layer(of) for of in (*range(count + new - last), *range(count - last, count))]
        problem = "no multiple of" if blocks == "stack" else "more than twice"
        raise InputError(
            f"layers would be {count + new}, {problem} the present {count}, which {blocks} cannot "
            "make; choose another number, or --blocks interpose"
        )
    behind = _behind(count, options.get("layers"), place or PLACES[0])
    order = []
    for layer in range(count):
        order += [Layer(layer)] + [Layer(layer, blocks == "identity")] * behind.count(layer)
    return order


def _behind(count: int, layers: str | None, place: str) -> list[int]:
    """Behind which layers of the source new ones go."""
    if place in PLACES:
        new = _new(count, layers)
        if place == "end":
            return [count - 1] * new
        return [-(-(index + 1) * count // new) - 1 for index in range(new)]
    behind = sorted(int(each) for each in place.split(","))
    if behind[-1] >= count:
        raise InputError(
            f"place names layer {behind[-1]}, but there are {count} layers, counted from 0; choose "
            f"numbers up to {count - 1}"
        )
    if layers is not None and _new(count, layers) != len(behind):
        raise InputError(
            f"layers {layers} adds {_new(count, layers)} to the present {count}, but place names "
            f"{len(behind)} places; leave one of them out"
        )
    return behind


def _new(count: int, layers: str | None) -> int:
    """How many layers are new."""
    if layers is None:
        raise InputError(
            f"layers is missing; give a factor like x1.5 or x2, or a number like {2 * count}"
        )
    wanted = int(count * LAYERS.factor(layers, count))
    if not count < wanted <= MOST_LAYERS:
        raise InputError(
            f"layers {layers} makes {wanted:,} of the present {count}; choose more, such as "
            f"x2, and at most {MOST_LAYERS:,}"
        )
    return wanted - count


def _check(family: Family, complete: Config, order: Sequence[Layer], where: str) -> None:
    """Refuse what a model class would compute otherwise.

    Raises:
        InputError: names a way that would work.
    """
    model = f"the {family.name} model in {where}"
    if family.normed_sums(complete) and any(layer.idle for layer in order):
        raise InputError(
            f"{model} has norms behind the sum of what a layer adds and what it is given, so that "
            "no new layer can leave that as it is; choose --blocks stack, overlap or interpose"
        )
    if why := family.fixed(complete).get("layers"):
        raise InputError(f"layers of {model} {why}")


def _fitted(family: Family, config: Config, deeper: Config, order: list[Layer]) -> list[Layer]:
    """The nearest order in which layers are of the kinds that the class has in their places.

    A class may decide kinds by the numbers of layers, by periods say, or compute with these
    numbers. New layers do nothing at first, so they can start as any layer of their kind.
    """
    before, after = _by_layer(family, config), _by_layer(family, deeper)
    numbered = family.numbered(family.complete(config))

    def fits(layer: Layer, place: int) -> bool:
        same = before[layer.of].keys() == after[place].keys()
        return same and (layer.idle or not numbered or layer.of == place)

    if all(fits(layer, place) for place, layer in enumerate(order)):
        return order
    present = [Layer(of) for of in before]
    wanted = [place for place, layer in enumerate(order) if not layer.idle]
    latest, place = [0] * len(present), len(order)
    for layer in reversed(present):
        place = max((each for each in range(place) if fits(layer, each)), default=-1)
        latest[layer.of] = place
    found: list[Layer] = []
    for place in range(len(order)):
        of = sum(not layer.idle for layer in found)
        if of < len(present) and fits(Layer(of), place) and place >= min(wanted[of], latest[of]):
            found.append(Layer(of))
            continue
        nearest = sorted(present, key=lambda layer: abs(layer.of - of + 1))
        found += [Layer(each.of, True) for each in nearest if fits(Layer(each.of, True), place)][:1]
    done = [layer.of for layer in found if not layer.idle]
    return found if done == [*before] and len(found) == len(order) else order


def _transforms(
    family: Family, source: Weights, config: Config, order: Sequence[Layer]
) -> dict[str, Transform]:
    """How every tensor is made.

    Raises:
        InputError: a layer would be of another kind than the one that it comes from, or compute
            with another number.
    """
    before, after = _by_layer(family, source.config), _by_layer(family, config)
    numbered = family.numbered(family.complete(source.config))
    for place, layer in enumerate(order):
        if numbered and layer.of != place and not layer.idle:
            raise InputError(
                f"layer {layer.of} of {source.where()} would be number {place}, but with "
                f"{numbered} layers compute with their number; put identity blocks behind the "
                "others (--place end)"
            )
        if before[layer.of].keys() != after[place].keys():
            raise InputError(
                f"no config of a {family.name} model makes layer {place} of the same kind as layer "
                f"{layer.of} of {source.where()}; choose --blocks identity or interpose"
            )
    writing = family.writers(source.config)
    made: dict[str, Transform] = {
        each.name: Kept(each.name) for each in family.members(config) if each.layer is None
    }
    for place, layer in enumerate(order):
        for inside, (name, described, *_) in after[place].items():
            of = before[layer.of][inside].name
            if not layer.idle:
                made[name] = Kept(of, why=f"layer {layer.of} as it is")
            elif described.name in writing:
                why = "zero, so that the new layer hands on what it is given"
                made[name] = Constant(source.tensors[of].dtype, 0.0 - described.offset, why, of)
            else:
                made[name] = Kept(of, why=f"in a new layer, as in layer {layer.of}", new=True)
    return {name: made[name] for name in family.patterns(config)}


def _by_layer(family: Family, config: Config) -> dict[int, dict[tuple[str, int | None], Member]]:
    """The tensors of every layer, by what they are within the layer."""
    found: dict[int, dict[tuple[str, int | None], Member]] = {}
    for each in family.members(config):
        if each.layer is not None:
            inside = each.tensor.name.partition("{layer}")[2], each.number
            found.setdefault(each.layer, {})[inside] = each
    return found


OPERATION = Depth()
