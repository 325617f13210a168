"""Where and why two models differ: corresponding states, and the cause of a fault."""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING
from growkit.base.errors import InputError
from growkit.base.limits import within, within_each
from growkit.base.tensors import TORCH_NAMES, main_dtype, parts
from growkit.engine.metrics import error_of
from growkit.model.families.family_parts import component_of
from growkit.model.model import Model
from growkit.planning.plan import Lineage
from growkit.results.proof_result import Fault


def copies_of(states: Tensor, source: Tensor) -> Tensor:
    """The states that the target should have.

    Args:
        states: states of the source, [..., coordinates].
        source: source coordinate of each target coordinate; ``NOTHING`` for zeros.
    """
    zero = states.new_zeros(*states.shape[:-1], 1)  # ``NOTHING`` is -1 and selects this coordinate
    return torch.cat([states, zero], -1)[..., source.to(states.device)]


MATCHED = 16
"""Number of tokens by whose states coordinates are matched."""

AT_ONCE = 1 << 10
"""Number of coordinates that are matched at a time."""


def copied_states(expected: Tensor, of_target: Tensor) -> Tensor | None:
    """The source coordinate of each of the target's hidden coordinates; None if these are fewer.

    They are copies of the whole space or of single coordinates, one after the other, or else those
    with the nearest values.

    Args:
        expected: states of the source, [tokens, hidden].
        of_target: states of the target.
    """
    size, grown = expected.shape[-1], of_target.shape[-1]
    if grown < size:
        return None
    blocks = torch.arange(grown) % size
    some, others = expected[:MATCHED].float().T, of_target[:MATCHED].float().T
    columns = torch.cat([some, torch.zeros_like(some[:1])])
    parts = [torch.cdist(part, columns, torch.inf).argmin(1) for part in others.split(AT_ONCE)]
    near = torch.cat(parts).cpu()
    orders = blocks, blocks.sort().values, torch.where(near == size, NOTHING, near)

    def error(order: Tensor) -> float:
        return round(error_of(of_target, copies_of(expected, order)), 9)

    return min(orders, key=error)


def tensor_fault(lineage: Lineage, target: Model, name: str, layer: int | None) -> Fault:
    """Compare a wrong tensor with the tensor that the recipe makes, or with the source's.

    Args:
        lineage: how the target was made.
        target: the written weights.
        name: name of the tensor; of the source's tensor if the target lacks it.
        layer: index of the first layer that differs.
    """
    untied = {**target.config, "tie_word_embeddings": False}  # a tied model's head may be at fault
    members: dict[str, Any] = {}
    with suppress(InputError):  # without a manifest, no family may describe the model
        members = {member.name: member.tensor for member in target.family.members(untied)}
    component = component_of(members[name]) if name in members else None
    fault = Fault(layer=layer, component=component, tensor=name)
    planned = lineage.target
    wanted, actual = planned.tensors.get(name), target.tensors.get(name)
    if wanted and actual and wanted.shape == actual.shape and lineage.repeatable(name):
        places: list[Any] = parts(target, name) if len(actual.shape) > 1 else [None]
        blocks = ((planned.read(name, rows), target.read(name, rows)) for rows in places)
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[main_dtype(target.tensors)])
        fault.factor, fault.cause = cause_of(blocks, float(torch.finfo(dtype).eps))
    return fault


def cause_of(
    blocks: Iterable[tuple[Tensor, Tensor]], spacing: float
) -> tuple[float | None, str | None]:
    """The most likely cause of a difference, with the factor if values were multiplied.

    Args:
        blocks: expected and actual values of consecutive rows, each [rows, ...]; or of a vector.
        spacing: relative spacing of numbers in the dtype, to which products were rounded.
    """
    ratios, close, wrong = [], [], []
    for pair in blocks:
        expected, actual = (
            values.double().reshape(len(values) if values.dim() > 1 else 1, -1) for values in pair
        )
        square = expected.square().sum(1)
        ratio = torch.where(square > 0, (expected * actual).sum(1) / square, 1.0)
        off = (actual - ratio[:, None] * expected).square().sum(1).sqrt()
        close.append(within_each(off, spacing * actual.square().sum(1).sqrt()))
        wrong.append((actual != expected).any(1))
        ratios.append(ratio)
    places = torch.cat(wrong).nonzero()[:, 0]
    if not len(places):
        return None, None
    count = sum(map(len, wrong))
    every = "everything is" if len(places) == count else f"{len(places)} of {count} rows are"
    ratio = torch.cat(ratios)[places]
    factor = float(ratio.mean())
    if not bool(torch.cat(close)[places].all()) or within(abs(factor - 1), spacing):
        rows = f"{len(places)} of {count} rows have" if count > 1 else "it has"
        return None, f"{rows} other weights"
    if not bool(within_each((ratio - factor).abs(), spacing * abs(factor)).all()):
        return None, f"{every} multiplied, each by a number of its own"
    return factor, f"{every} multiplied by {factor_sentence(factor, spacing)}"


def factor_sentence(factor: float, spacing: float) -> str:
    """Format a factor, with the digits that weights of this relative spacing have."""
    digits = min(6, math.ceil(-math.log10(spacing)))
    return f"{'about ' if digits < 6 else ''}{factor:.{digits}g}"
