"""Parts that change nothing: idle layers, repeated experts, and hidden units that nothing reads.

Growth, also by other software, leaves such parts: layers that return their input, as their last
matrices are zero (LLaMA Pro, arXiv 2401.02415), copies of experts, and units of the MLP with zeros
in its last matrix. All layers have the same number of units, so as many are left out of each as can
be left out of all.
"""

from collections.abc import Iterator, Mapping

from growkit.base.axes import Role
from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.extras.depth.growth.depth import plan_layers
from growkit.extras.depth.growth.layer_types import HANDING_ON
from growkit.extras.shrinking.equal_experts import merged_experts
from growkit.extras.shrinking.selecting import Selected
from growkit.model.families.family import Layer
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan, Planned
from growkit.planning.router_ties import lost_in_ties
from growkit.planning.transforms import Kept, Transform

FFN = "ffn"
"""The axis of the units."""


class Unused(Operation):
    """See the module."""

    name = "unused"
    paper = "-"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        plans, warnings, lost, where = list[Plan](), list[str](), "", source.where()
        if idle := {*_idle_layers(source)}:
            order = [Layer(of) for of in range(source.sizes["layers"]) if of not in idle]
            try:
                plan, warnings = plan_layers(source, [order], {"blocks": "stack"}, seed)
            except InputError as error:
                why, _, _ = str(error).partition("; ")  # before the remedy, which is for growth
                raise InputError(
                    f"{why}, so layers that return their input cannot be left out; choose --method "
                    "undo or vocabulary"
                ) from None
            plans, source = [plan], Planned(source, plan)
        merging, equal = merged_experts(source)
        if merging and source.family.experts:
            lost = lost_in_ties(source, source.family.experts, "experts", "equal ones")
            plans, source = [*plans, merging], Planned(source, merging)
        if units := _unread_units(source):
            plans.append(_without_units(source, units))
        if not plans:
            equal = equal or "no two experts have equal weights and rows of the router"
            raise InputError(
                f"no layer of {where} returns its input, {equal}, and some layer reads all of its "
                "hidden units, so nothing can be left out; choose --method undo or vocabulary"
            )
        warnings = [*warnings, *filter(None, [equal])]
        promise = "bounded" if lost else "exact"
        return Change(plans, promise, lost, by_ties=bool(lost), warnings=warnings)


def _idle_layers(source: Model) -> Iterator[int]:
    """Layers that return their input and can be left out, from the last to the first."""
    family, complete = source.family, source.complete
    if complete.get(HANDING_ON) is not None or family.normed_sums(complete):
        return
    idle = dict.fromkeys(range(source.sizes["layers"]), True)
    for member in family.members(source.config):
        layer, tensor = member.layer, member.tensor
        if layer is not None and tensor.idle is not None and idle[layer]:
            idle[layer] = _is_filled(
                source, member.name, tensor.idle - tensor.offset, tensor.diagonal
            )
    by_index = family.numbered(complete) or (family.form and family.form.lambda_init)
    for layer in reversed(range(1, len(idle))):
        if idle[layer]:
            yield layer
        elif by_index:  # layers behind others would compute with another index
            return


def _is_filled(source: Model, name: str, value: float, diagonal: float | None) -> bool:
    """Whether a tensor is filled with a value, or a matrix with another one on its diagonal."""
    if diagonal is None:
        return all(bool((block == value).all()) for block in source.blocks(name))
    matrix = source.read(name)
    on_diagonal = torch.eye(*matrix.shape, dtype=torch.bool)
    return bool((matrix == torch.where(on_diagonal, diagonal, value)).all())


def _unread_units(source: Model) -> dict[int, list[int]]:
    """For each layer, the units to leave out, as many in each; empty if there are none.

    Experts have units of their own in each expert, so theirs stay.
    """
    unread: dict[int, list[int]] = {}
    for member in source.family.members(source.config):
        dimensions = member.pattern.dimensions
        for at, dimension in enumerate(dimensions):
            if FFN not in dimension.axes:
                continue
            reads, innermost = dimension.role is Role.READ, str(dimension).split(".")[-1] == FFN
            if member.layer is None or member.number is not None or len(dimensions) > 2:
                return {}
            if not innermost or (reads and (member.layer in unread or dimension.axes != {FFN})):
                return {}
            if reads:
                blocks = [block != 0 for block in source.blocks(member.name)]
                read = torch.cat(blocks).any(1 - at)
                unread[member.layer] = (~read).nonzero()[:, 0].tolist()
    count = min(map(len, unread.values()), default=0)
    count = min(count, source.sizes.get(FFN, 1) - 1) if len(unread) == source.sizes["layers"] else 0
    return {layer: units[-count:] for layer, units in unread.items()} if count else {}


def _without_units(source: Model, units: Mapping[int, list[int]]) -> Plan:
    family, width = source.family, source.sizes[FFN]
    transforms: dict[str, Transform] = {}
    for member in family.members(source.config):
        transforms[member.name] = Kept(member.name)
        for at, dimension in enumerate(member.pattern.dimensions):
            if member.layer is not None and FFN in dimension.axes:
                gone, size = {*units[member.layer]}, dimension.size(source.sizes)
                kept = [index for index in range(size) if index % width not in gone]
                transforms[member.name] = Selected(member.name, kept, "the units that are read", at)
    left = width - len(next(iter(units.values())))
    config = family.resized(source.config, {**source.sizes, FFN: left})
    return Plan.checked(source, config, transforms)


OPERATION = Unused()
