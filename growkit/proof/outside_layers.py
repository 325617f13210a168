"""Where two models part before their layers, or behind them, and the most likely cause."""

from __future__ import annotations

import torch
from torch import Tensor

from growkit.base.limits import within_each
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.proof.causes import Part, cause_of, factor_said
from growkit.proof.copies import Copied
from growkit.proof.localisation import TOKENS
from growkit.results.proof import Fault


def find_fault_before_layers(
    source: Layerwise,
    target: Layerwise,
    copied: Copied | None,
    ids: Tensor,
    tolerance: float,
    spacing: float,
) -> Fault:
    """Look into embeddings that differ; in strict float64.

    Args:
        source: the source.
        target: the target.
        copied: what the target's hidden states hold, if that is known.
        ids: a prompt on which they differ, [tokens].
        tolerance: relative error that is only rounding.
        spacing: of the numbers that the target is stored in.
    """
    one, other = (next(model.stages([Call(ids)])).after[0] for model in (source, target))
    copied = copied or _in_blocks(one.shape[1], other.shape[1])
    expected = copied.expected(one)
    part = Part("embedding", target.names[0], expected, other, 1)
    rows = ~within_each((other - expected).abs().amax(1), tolerance * _scale(expected))
    factor, cause = cause_of(part, tolerance, spacing)
    if factor is None:
        cause = f"the embeddings of {int(rows.sum())} of {len(ids)} tokens differ"
    return Fault(
        layer=None,
        component="embedding",
        tensor=f"{target.names[0]}.weight",
        cause=cause,
        factor=factor,
    )


def find_fault_behind_layers(
    source: Layerwise,
    target: Layerwise,
    copied: Copied | None,
    ends: tuple[Tensor, Tensor],
    tolerance: float,
    factor: float | None,
    spacing: float,
) -> Fault:
    """Look behind the layers, where all of them agree; in strict float64.

    Args:
        source: the source.
        target: the target.
        copied: what the target's hidden states hold, if that is known.
        ends: what the last layers hand on, each [tokens, hidden].
        tolerance: relative error that is only rounding.
        factor: by which all logits are multiplied, if that is all.
        spacing: relative spacing of the numbers that weights are stored in.
    """
    models = source, target
    one, other = (_given_to_head(model, end) for model, end in zip(models, ends, strict=True))
    copied = copied or _in_blocks(one.shape[1], other.shape[1])
    name = f"{target.names[-1]}.weight"
    # The norm writes copies, or for a tied head parts that sum up to the source's.
    untied = source.stores(f"{source.names[-1]}.weight")
    summed = copied.summed(other, one.shape[1]) * copied.factor  # of what a tied head reads
    rest = other - copied.expected(one) if untied else summed - one
    agree = bool(within_each(rest.abs(), tolerance * _scale(one)).all())
    return Fault(
        layer=None,
        component="lm_head" if agree else "norm",
        tensor=name if agree and target.stores(name) else None,
        cause=None
        if factor is None
        else f"all logits are multiplied by {factor_said(factor, spacing)}",
        factor=factor,
    )


def _scale(values: Tensor) -> Tensor:
    """The root mean square of all values."""
    return values.square().mean().sqrt()


def _in_blocks(size: int, grown: int) -> Copied:
    """The whole space again and again."""
    return Copied(torch.arange(grown) % size)


def _given_to_head(model: Layerwise, end: Tensor) -> Tensor:
    given: list[Tensor] = []
    head = model.model.get_submodule(model.names[-1])
    hook = head.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0]))
    try:
        with model.head() as run:
            run(end[:TOKENS])
    finally:
        hook.remove()
    return given[0]
