"""Equal experts are merged where routers then choose the same, with the same weights.

Experts are equal if their weights and what routers have for them are. Let the number of equal
experts be a multiple of c, for every expert of every layer, and let a token go through c·k of them.
The c·k largest logits are then the k largest without repetitions, c times each, so of c equal
experts one can stay, and a token goes through k: as ``growkit.extras.experts.growth.experts``
derives, the weight of an expert is the sum of those of its copies.
"""

from collections import Counter
from hashlib import blake2b
from math import gcd

from growkit.base.lazy import torch
from growkit.extras.experts.growth.experts import EXPERTS, along_experts, expert_of
from growkit.extras.shrinking.selecting import Selected
from growkit.model.families.family_parts import Experts, value_at, with_value
from growkit.model.model import Model
from growkit.planning.plan import Plan
from growkit.planning.transforms import Kept, Transform

Orders = dict[int | None, list[int]]
"""For each layer with experts, those that stay."""


def merged_experts(source: Model) -> tuple[Plan | None, str]:
    """Plan a model without repeated experts.

    Returns:
        The plan, None if all experts stay; and why equal ones stay, empty if there are none.
    """
    experts = source.family.experts
    kinds = {} if experts is None else _kinds_of_experts(source)
    repeated = [layer for layer, of in kinds.items() if len({*of}) < len(of)]
    if experts is None or not repeated:
        return None, ""
    top_k = value_at(source.complete, experts.top_k)
    copies = gcd(top_k, *(count for of in kinds.values() for count in Counter(of).values()))
    why = _not_merged(source, experts, copies)
    if why:
        return None, f"equal experts of layer {repeated[0]} stay, as {why}"
    orders: Orders = {
        layer: [at for at, kind in enumerate(of) if of[:at].count(kind) % copies == 0]
        for layer, of in kinds.items()
    }
    return _plan(source, experts, orders, copies), ""


def _kinds_of_experts(source: Model) -> dict[int, list[bytes]]:
    """For each layer, a digest of every expert, with what routers have for it."""
    digests: dict[int, list[blake2b]] = {}
    for member in source.family.members(source.config):
        at, number = along_experts(member), expert_of(member)
        if member.layer is None or at is None is number:
            continue
        count = source.sizes[EXPERTS]
        of_layer = digests.setdefault(member.layer, [blake2b() for _ in range(count)])
        for expert in range(count) if number is None else [number]:
            where = () if number is not None else (*[None] * (at or 0), slice(expert, expert + 1))
            bits = source.read(member.name, *where).contiguous().flatten().view(torch.uint8)
            of_layer[expert].update(member.tensor.name.encode() + bits.numpy().tobytes())
    return {layer: [digest.digest() for digest in of] for layer, of in digests.items()}


def _not_merged(source: Model, experts: Experts, copies: int) -> str:
    """Why a router would choose or weigh experts in another way; empty if it would not."""
    complete = source.complete
    if any((complete.get(key) or 1) > 1 for key in experts.groups):
        return f"a token chooses groups of them first ({' and '.join(experts.groups)})"
    if experts.divided or (experts.alone(complete) and not experts.scaling):
        return "their weights do not sum to those of one expert"
    if copies == 1:
        return (
            f"{experts.top_k} and the numbers of copies of all experts in all layers have no "
            "common divisor, so tokens would go through other experts"
        )
    return ""


def _plan(source: Model, experts: Experts, orders: Orders, copies: int) -> Plan:
    family, complete = source.family, source.complete
    sizes = {**source.sizes, EXPERTS: source.sizes[EXPERTS] // copies}
    config = family.resized(source.config, sizes)
    config = with_value(config, experts.top_k, value_at(complete, experts.top_k) // copies)
    if experts.alone(complete) and experts.scaling:
        config = with_value(config, experts.scaling, complete[experts.scaling] * copies)
    coefficient = value_at(complete, experts.balancing)
    if isinstance(coefficient, int | float):  # the loss is proportional to top_k
        config = with_value(config, experts.balancing, coefficient * copies)
    transforms: dict[str, Transform] = {}
    for member in family.members(config):
        at, number = along_experts(member), expert_of(member)
        transforms[member.name] = Kept(member.name)
        if number is not None:
            expert = orders[member.layer][number]
            transforms[member.name] = Kept(
                member.tensor.name.format(layer=member.layer, expert=expert)
            )
        elif member.layer is not None and at is not None:
            left = orders[member.layer]
            transforms[member.name] = Selected(member.name, left, "one of equal experts", at)
    return Plan.checked(source, config, transforms, unread="an equal expert is left")
