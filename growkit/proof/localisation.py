"""Where and why two models differ: what their states correspond to, and the cause of a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING
from growkit.base.limits import within, within_each
from growkit.base.tensors import TORCH_NAMES, Weights, main_dtype, parts
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.class_weights import ClassWeights
from growkit.engine.layerwise import Layerwise
from growkit.engine.loader import loading
from growkit.engine.metrics import error_of
from growkit.engine.oracle import lacks_class
from growkit.families.description import component_of
from growkit.families.family import stored_family
from growkit.planning.layouts import read_layout
from growkit.planning.plan import Lineage, Places, traced
from growkit.results.proof import Fault

TOKENS = 64
"""Tokens of the last states that are looked at."""

OF_HEADS = ("q_proj", "k_proj", "v_proj")
"""Components whose rows are those of heads."""

SAME = 1e-9
"""Relative difference of two products of a row below which the rows are the same."""


@dataclass(frozen=True)
class Copied:
    """Which coordinate of the source each one of the target copies.

    Attributes:
        source: [coordinates of the target], ``NOTHING`` for zeros.
        factor: what the target's tensor is multiplied by.
    """

    source: Tensor
    factor: float = 1.0

    def expected(self, given: Tensor) -> Tensor:
        """What the target should have of the source's [..., coordinates]."""
        zero = given.new_zeros(*given.shape[:-1], 1)  # where ``NOTHING`` points to
        return torch.cat([given, zero], -1)[..., self.source.to(given.device)]

    def summed(self, found: Tensor, size: int) -> Tensor:
        """The sums of copies in the target's [..., coordinates]; ``size`` is the source's."""
        sums = found.new_zeros(*found.shape[:-1], size + 1)
        return sums.index_add_(-1, self.source.to(found.device) % (size + 1), found)[..., :-1]


def copied_states(expected: Tensor, found: Tensor, copied: Copied | None) -> Copied | None:
    """How the target's hidden states hold the source's; None if they cannot.

    Args:
        expected: states of the source, [tokens, hidden].
        found: those of the target.
        copied: what is known of it; without, whole spaces or single coordinates may be repeated.
    """
    size, grown = expected.shape[-1], found.shape[-1]
    if copied and len(copied.source) == grown:
        return copied
    if grown % size:
        return None
    places = torch.arange(grown)
    orders = Copied(places % size), Copied(places // (grown // size))
    return min(orders, key=lambda order: error_of(found, order.expected(expected)))


def hidden_copies(
    lineage: Lineage, before: Checkpoint, after: Checkpoint, embeddings: Sequence[str]
) -> Copied | None:
    """What hidden states copy, read off the embeddings; None if that is not known.

    Args:
        lineage: how the target was made.
        before: the source.
        after: the target.
        embeddings: names of both embeddings in their classes, [vocabulary, hidden].
    """
    if not lineage.plans:
        return None
    old, new = (_stored(*each) for each in zip((before, after), embeddings, strict=True))
    made = traced(lineage.plans, new.tensor, 1, new) if new else None
    if not (made and new and old) or old.source is not None or made.tensor != old.tensor:
        return None
    size, grown = before.tensors[old.tensor].shape[1], after.tensors[new.tensor].shape[1]
    source = np.arange(grown) if made.source is None else made.source
    if len(source) != grown or source.max(initial=NOTHING) >= size:
        return None  # the manifest does not describe this target
    return Copied(torch.from_numpy(source), made.factor / old.factor)


def _stored(checkpoint: Checkpoint, name: str) -> Places | None:
    """The stored tensor that a parameter of the class is, and the places of its columns."""
    if lacks_class(checkpoint.config):
        return traced((read_layout(checkpoint),), name, 1)
    stored = ClassWeights(checkpoint, loading(checkpoint).conversions).stored_as(name)
    return Places(stored) if stored else None


def spacing(weights: Weights) -> float:
    """Relative spacing of the numbers that most weights are stored in."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[main_dtype(weights.tensors)])
    return float(torch.finfo(dtype).eps)


def tensor_fault(lineage: Lineage, target: Weights, name: str, layer: int | None) -> Fault:
    """Compare a tensor that does not give its source back with what the recipe makes.

    Args:
        lineage: how the target was made.
        target: the written weights.
        name: of the tensor; of the source where the target lacks it.
        layer: the first that differs.
    """
    family = stored_family(target)
    members = {each: described for each, described, _ in family.members(target.config)}
    component = component_of(members[name]) if name in members else None
    found = Fault(layer=layer, component=component, tensor=name)
    rule = lineage.plans[-1].by_target.get(name)
    if rule and lineage.repeatable(name) and target.tensors.get(name) == rule.info:
        planned = lineage.target
        places: list[slice | None] = (
            list(parts(target, name)) if len(rule.info.shape) > 1 else [None]
        )
        blocks = ((planned.read(name, rows), target.read(name, rows)) for rows in places)
        head_dim = family.sizes(target.config).get("head_dim", 0) if component in OF_HEADS else 0
        found.factor, found.cause = cause_of(blocks, spacing(target), head_dim=head_dim)
    return found


def cause_of(
    blocks: Iterable[tuple[Tensor, Tensor]],
    spacing: float,
    *,
    tolerance: float = 0.0,
    head_dim: int = 0,
) -> tuple[float | None, str | None]:
    """The most likely cause of a difference, and the factor if it is one.

    Args:
        blocks: consecutive rows, expected and found, each [rows, ...]; or a single vector.
        spacing: relative spacing of the numbers, to which products were rounded.
        tolerance: relative difference of an element that is only rounding.
        head_dim: rows of a head; 0 where rows are not those of heads.
    """
    ratios, close, wrong, marks, marked = [], [], [], [], []
    for pair in blocks:
        expected, found = (
            each.double().reshape(len(each) if each.dim() > 1 else 1, -1) for each in pair
        )
        square = expected.square().sum(1)
        ratio = torch.where(square > 0, (expected * found).sum(1) / square, 1.0)
        off = (found - ratio[:, None] * expected).square().sum(1).sqrt()
        close.append(within_each(off, (spacing + tolerance) * found.square().sum(1).sqrt()))
        scale = expected.square().mean().sqrt()
        wrong.append(~within_each((found - expected).abs().amax(1), tolerance * scale))
        ratios.append(ratio)
        numbers = torch.Generator().manual_seed(0)
        mark = torch.randn(expected.shape[1], generator=numbers, dtype=torch.float64)
        marks.append(expected @ mark.to(expected.device))
        marked.append(found @ mark.to(found.device))
    places = torch.cat(wrong).nonzero()[:, 0]
    if not len(places):
        return None, None
    count = sum(map(len, wrong))
    every = "everything is" if len(places) == count else f"{len(places)} of {count} rows are"
    if bool(torch.cat(close)[places].all()):
        ratio = torch.cat(ratios)[places]
        factor, slack = float(ratio.mean()), spacing + tolerance
        same = within_each((ratio - factor).abs(), slack * abs(factor))
        if not within(abs(factor - 1), slack) and bool(same.all()):
            return factor, f"{every} multiplied by {factor_sentence(factor, spacing)}"
        if not bool(same.all()):
            return None, f"{every} multiplied, each by a number of its own"
    order = _order(torch.cat(marks)[places], torch.cat(marked)[places])
    if order is None:
        rows = f"{len(places)} of {count} rows have" if count > 1 else "it has"
        return None, f"{rows} other weights"
    source = places[order]
    if head_dim and bool((source // head_dim == places // head_dim).all()):
        return None, "rows inside heads are in another order, as in RoPE layouts"
    if head_dim and bool((source % head_dim == places % head_dim).all()):
        return None, "heads are in another order"
    return None, f"{len(places)} rows are in another order"


def _order(expected: Tensor, found: Tensor) -> Tensor | None:
    """Which expected row is in each place, by one product of each; None if rows are others."""
    one, other = expected.sort(), found.sort()
    if not within_each((one.values - other.values).abs(), SAME * one.values.abs().max()).all():
        return None
    return one.indices[other.indices.argsort()]


def factor_sentence(factor: float, spacing: float) -> str:
    """A factor with as many digits as weights with such a relative spacing have."""
    digits = min(6, math.ceil(-math.log10(spacing)))
    return f"{'about ' if digits < 6 else ''}{factor:.{digits}g}"


def fault_outside_layers(
    models: tuple[Layerwise, Layerwise],
    copied: Copied | None,
    given: Sequence[Tensor] | Tensor,
    tolerance: float,
    factor: float | None,
    spacing: float,
) -> Fault:
    """Look at the embeddings; or behind the layers, where all of them agree. In strict float64.

    Args:
        models: source and target.
        copied: what the target's hidden states hold, if that is known.
        given: a prompt whose embeddings differ, [tokens]; or the outputs of both last layers, each
            [tokens, hidden].
        tolerance: relative error that is only rounding.
        factor: by which all logits are multiplied, if that is all.
        spacing: relative spacing of the numbers that the target is stored in.
    """
    source, target = models
    if isinstance(given, Tensor):
        one, other = (next(model.stages([Call(given)])).after[0] for model in models)
    else:
        one, other = (_given_to_head(model, end) for model, end in zip(models, given, strict=True))
    copied = copied_states(one, other, copied)
    if copied is None:
        return Fault(factor=factor)
    expected = copied.expected(one)
    if isinstance(given, Tensor):
        factor, cause = cause_of([(expected, other)], spacing, tolerance=tolerance)
        if factor is None:
            scale = expected.square().mean().sqrt()
            same = within_each((other - expected).abs().amax(1), tolerance * scale)
            cause = f"the embeddings of {int((~same).sum())} of {len(same)} tokens differ"
        name = f"{target.names[0]}.weight"
        return Fault(component="embedding", tensor=name, cause=cause, factor=factor)
    name = f"{target.names[-1]}.weight"
    # The norm writes copies, or for a tied head parts that sum up to the source's.
    if not source.stores(f"{source.names[-1]}.weight"):
        expected, other = one, copied.summed(other, one.shape[1]) * copied.factor
    found = Fault(component="norm", factor=factor)
    if within(error_of(other, expected), tolerance):
        tensor = name if target.stores(name) else None
        found = Fault(component="lm_head", tensor=tensor, factor=factor)
    if factor is not None:
        found.cause = f"all logits are multiplied by {factor_sentence(factor, spacing)}"
    return found


def _given_to_head(model: Layerwise, end: Tensor) -> Tensor:
    given: list[Tensor] = []
    head = model.model.get_submodule(model.names[-1])
    hook = head.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0]))
    with hook, model.head() as run:
        run(end[:TOKENS])
    return given[0]
