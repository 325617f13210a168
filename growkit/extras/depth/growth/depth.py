"""Growth in depth: new layers that change nothing at first, or repeated layers.

An identity block (Wu et al., "LLaMA Pro: Progressive LLaMA with Block Expansion", arXiv 2401.02415)
is a copy of the layer before it whose output is zero. The zeros get a gradient at once, the rest of
the layer after the first step. With ``kind`` it is of another kind than that layer, such as linear
attention; what no layer of the source has starts as ``growkit.extras.starts`` says.

Three other arrangements change the function: stacks (Du et al., "Stacking Your Transformers", arXiv
2405.15319), overlapping stacks (Kim et al., "SOLAR 10.7B", arXiv 2312.15166), and layers next to
their copies.
"""

import re
from collections.abc import Mapping, Sequence

from growkit.algebra.expansion import IndexMap, index_map, placed
from growkit.base.errors import InputError
from growkit.base.options import Option
from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.extras.depth.growth.layer_types import (
    PLACES,
    deeper_config,
    members_by_layer,
    new_layer_hands_on,
    of_kind,
)
from growkit.extras.starts import new_tensor
from growkit.model.families.family import Family, Layer
from growkit.model.families.family_parts import MAX_LAYERS, Member
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation, SizeOption
from growkit.planning.plan import Plan
from growkit.planning.transforms import Constant, Kept, Mapped, Transform


def _is_place(text: str) -> bool:
    return text in PLACES or bool(re.fullmatch(r"[0-9]{1,5}( *, *[0-9]{1,5})*", text))


LAYERS = SizeOption("layers", "number of layers; x1.5 turns 2 into 3", axes=("layers",))
OPTIONS: tuple[Option, ...] = (
    LAYERS,
    Option(
        "blocks",
        "new layers: blocks that change nothing at first (identity), the whole model again (stack) "
        "or without its middle (overlap), or copies of the layer before them (interpose)",
        ("identity", "stack", "overlap", "interpose"),
    ),
    Option(
        "place",
        "position of new layers of identity and interpose: evenly between old layers (even), at "
        "the end (end), or after the given layers, numbered from 0; repeat a number for more",
        form="even|end|N,N,…",
        accepts=_is_place,
    ),
    Option(
        "kind",
        "kind of the new layers, as config.json names it in a list with one entry for each layer, "
        "such as linear_attention (default: that of the layer before them)",
        form="NAME",
    ),
)


class Depth(Operation):
    """See ``growkit.planning.operation.Operation``."""

    name = "depth"
    paper = (
        "https://arxiv.org/abs/2401.02415 (identity), https://arxiv.org/abs/2405.15319 (stack), "
        "https://arxiv.org/abs/2312.15166 (overlap)"
    )
    options = OPTIONS

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``Operation``; false if the class derives λ_init from layer indices that change."""
        lambda_init = family.form.lambda_init if family.form else None
        order = enumerate(arrangement(family.sizes(config)["layers"], options))
        return lambda_init is None or all(
            layer.idle or lambda_init(layer.of) == lambda_init(place) for place, layer in order
        )

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family = source.family
        even = options["blocks"] == "identity" and options.get("place", PLACES[0]) == PLACES[0]
        if even and family.numbered(source.complete):
            options = {**options, "place": PLACES[1]}
        order = arrangement(source.sizes["layers"], options)
        _check(source, order)
        orders = of_kind(source, order, options) if "kind" in options else [order]
        plan, warnings = plan_layers(source, orders, options, seed)
        settings = {"blocks": options["blocks"]}
        if options["blocks"] in ("identity", "interpose"):
            settings["place"] = options.get("place", PLACES[0])
        if options["blocks"] == "identity":
            return Change([plan], settled=settings, warnings=warnings)
        lost = "layers are computed more than once"
        return Change([plan], "different", lost, settings, warnings=warnings)


def plan_layers(
    source: Model, orders: Sequence[list[Layer]], options: Mapping[str, str], seed: int
) -> tuple[Plan, list[str]]:
    """Plan a model that consists of layers of the source, and perhaps of new ones.

    Args:
        source: the source.
        orders: possible layers of the target, in order; the first that fits best is taken.
        options: options of the method.
        seed: seed of new tensors.

    Returns:
        The plan, and warnings for users of the result.

    Raises:
        InputError: the class would compute another function, or has no such models.
    """
    family = source.family
    ways = [deeper_config(source, order, options) for order in orders]
    config, order, warnings, contradicting = min(
        ways, key=lambda way: (new_layer_hands_on(source, way[1]), len(way[2]))
    )
    if new_layer_hands_on(source, order):
        movable = options.get("place", PLACES[0]) in PLACES
        remedy = "choose another number of layers" if movable else "leave out --place"
        raise InputError(
            f"the last layer of each type of the {family.name} model in {source.where()} hands its "
            f"keys and values on, which no new layer can do; {remedy}"
        )
    family.check_bounds(config, "the deeper model")
    transforms = _transforms(source, config, order, seed, "kind" in options)
    record = {"layers": tuple(order), "contradicting": contradicting}
    unread = "its layer returns its input"
    return Plan.checked(source, config, transforms, None, unread, **record), warnings


def arrangement(count: int, options: Mapping[str, str]) -> list[Layer]:
    """List the layers of the target, in order.

    Args:
        count: number of layers of the source.
        options: options of the method.

    Raises:
        InputError: the options contradict each other, or name impossible numbers.
    """
    blocks, place = options["blocks"], options.get("place")
    if blocks in ("stack", "overlap"):
        if place is not None:
            raise InputError(
                f"place is {place!r}, but {blocks} has its own order; leave out --place"
            )
        new = _new(count, options.get("layers"))
        if blocks == "stack" and new % count == 0:
            return [Layer(of) for of in [*range(count)] * (1 + new // count)]
        if blocks == "overlap" and new <= count:
            # The first layers and then the last ones; those in both parts occur twice.
            last = (count + new) // 2
            return [Layer(of) for of in (*range(count + new - last), *range(count - last, count))]
        problem = "not a multiple of" if blocks == "stack" else "more than twice"
        raise InputError(
            f"layers would be {count + new}, {problem} the present {count}, which {blocks} cannot "
            "make; choose another number, or --blocks interpose"
        )
    preceding = _preceding(count, options.get("layers"), place or PLACES[0])
    order = []
    for layer in range(count):
        order += [Layer(layer)] + [Layer(layer, blocks == "identity")] * preceding.count(layer)
    return order


def _preceding(count: int, layers: str | None, place: str) -> list[int]:
    """The index of the source's layer before each new layer."""
    if place in PLACES:
        new = _new(count, layers)
        if place == "end":
            return [count - 1] * new
        return [-(-(index + 1) * count // new) - 1 for index in range(new)]
    preceding = sorted(int(number) for number in place.split(","))
    if preceding[-1] >= count:
        raise InputError(
            f"place names layer {preceding[-1]}, but there are {count} layers, numbered from 0; "
            f"choose numbers up to {count - 1}"
        )
    if layers is not None and _new(count, layers) != len(preceding):
        raise InputError(
            f"layers {layers} adds {_new(count, layers)} to the present {count}, but place names "
            f"{len(preceding)} places; leave one of them out"
        )
    return preceding


def _new(count: int, layers: str | None) -> int:
    """The number of new layers."""
    if layers is None:
        raise InputError(
            f"layers is missing; give a factor like x1.5 or x2, or a number like {2 * count}"
        )
    wanted = int(count * LAYERS.factor(layers, count))
    if not count < wanted <= MAX_LAYERS:
        raise InputError(
            f"layers {layers} makes {wanted:,} of the present {count}; choose more, such as "
            f"x2, and at most {MAX_LAYERS:,}"
        )
    return wanted - count


def _check(source: Model, order: Sequence[Layer]) -> None:
    """Refuse new layers with which the class would compute another function.

    Raises:
        InputError: the class would; the message names a way that works, if there is one.
    """
    family, complete = source.family, source.complete
    model = f"the {family.name} model in {source.where()}"
    if family.normed_sums(complete) and any(layer.idle for layer in order):
        raise InputError(
            f"{model} normalises the sum of a layer's input and its contribution, so no new layer "
            "can leave its input unchanged; choose --blocks stack, overlap or interpose"
        )
    if why := family.fixed(complete).get("layers"):
        raise InputError(f"layers of {model} {why}")


def _transforms(
    source: Model, config: Config, order: Sequence[Layer], seed: int, asked: bool
) -> dict[str, Transform]:
    """Make the transform of every tensor.

    Args:
        source: the source.
        config: config of the target.
        order: its layers.
        seed: seed of new tensors.
        asked: whether a user asks for the kind of new layers.

    Raises:
        InputError: a layer would differ in kind from its source, or compute with another index.
    """
    family, sizes = source.family, source.family.sizes(config)
    before, after = members_by_layer(family, source.config), members_by_layer(family, config)
    numbered = family.numbered(source.complete)
    others = "another number of layers", "--blocks identity or interpose"
    other = others[not any(layer.idle for layer in order)]
    for place, layer in enumerate(order):
        if numbered and layer.of != place and not layer.idle:
            raise InputError(
                f"layer {layer.of} of {source.where()} would become layer {place}, but with "
                f"{numbered} layers compute with their index or with what others hand them; put "
                "identity blocks at the end (--place end)"
            )
        if before[layer.of].keys() != after[place].keys() and not (asked and layer.idle):
            raise InputError(
                f"no config of {family.one} makes layer {place} of the same kind as layer "
                f"{layer.of} of {source.where()}; choose {other}"
            )
    transforms: dict[str, Transform] = {
        member.name: _of_all_layers(member, source.sizes, [layer.of for layer in order])
        for member in family.members(config)
        if member.layer is None
    }
    for place, layer in enumerate(order):
        for inside, member in after[place].items():
            name, described, *_ = member
            if inside not in before[layer.of]:
                info = TensorInfo(member.pattern.shape(sizes), main_dtype(source.tensors))
                transforms[name] = new_tensor(member, f"{seed}:{name}", info)
                continue
            of = before[layer.of][inside].name
            if not layer.idle:
                transforms[name] = Kept(of, why=f"layer {layer.of} as it is")
            elif (idle := described.idle) is not None:
                why = f"{idle:g}, so that the new layer passes on its input unchanged"
                dtype, value = source.tensors[of].dtype, idle - described.offset
                transforms[name] = Constant(dtype, value, why, of, described.diagonal)
            else:
                transforms[name] = Kept(of, why=f"in a new layer, as in layer {layer.of}", new=True)
    return {name: transforms[name] for name in family.patterns(config)}


def _of_all_layers(member: Member, sizes: Mapping[str, int], layers: Sequence[int]) -> Transform:
    """A tensor outside of the layers, in which every layer may have a part."""
    dimensions = member.pattern.dimensions
    if not any("layers" in dimension.axes for dimension in dimensions):
        return Kept(member.name)

    def maps() -> tuple[IndexMap, ...]:
        along = {"layers": placed(len(before), layers, [1.0] * len(layers))}
        return tuple(index_map(dimension, sizes, along) for dimension in dimensions)

    before = range(sizes["layers"])
    return Mapped(member.name, maps, "the part of every layer goes with it")


OPERATION = Depth()
