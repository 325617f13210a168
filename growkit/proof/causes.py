"""The most likely cause of a difference, from what a component should hand on and what it does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.base.limits import within, within_each
from growkit.checkpoint.tensors import TORCH_NAMES, Weights, main_dtype


@dataclass(frozen=True)
class Part:
    """What one component hands on: rows of the source as the target should have them, and has."""

    component: str
    module: str
    expected: Tensor  # [tokens, rows of the target]
    found: Tensor  # [tokens, rows of the target]
    head_dim: int

    @property
    def error(self) -> float:
        """Largest difference, relative to the scale of what is expected."""
        scale = self.expected.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        return float((self.found - self.expected).abs().max() / scale)


def spacing(weights: Weights) -> float:
    """Relative spacing of the numbers that most weights are stored in."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[main_dtype(weights.tensors)])
    return float(torch.finfo(dtype).eps)


def cause_of(part: Part, tolerance: float, spacing: float) -> tuple[float | None, str | None]:
    """The most likely cause of a difference, and the factor if it is one.

    Weights that were multiplied were rounded, too: to numbers that are ``spacing`` apart.
    """
    expected, found = part.expected, part.found
    product = float((expected * found).sum())
    factor = product / float(expected.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
    off = abs(factor - 1)
    slack = tolerance + spacing
    if not within(off, slack) and _close(found, factor * expected, slack * (1 + off)):
        return factor, f"everything is multiplied by {factor_said(factor, spacing)}"
    if part.component == "attention":
        return None, (
            "queries, keys and values agree: λ, the head norm, the rotation or the mask differs"
        )
    scale = expected.square().mean().sqrt()
    wrong = (~within_each((found - expected).abs().amax(0), tolerance * scale)).nonzero()[:, 0]
    moved = _moved(expected, found, wrong, tolerance)
    if moved is not None:
        heads = part.component in ("q_proj", "k_proj", "v_proj")
        inside = bool((moved // part.head_dim == wrong // part.head_dim).all())
        if heads and inside:
            return None, "rows inside of heads stand in another order, as RoPE patterns do"
        if heads and bool((moved % part.head_dim == wrong % part.head_dim).all()):
            return None, "heads stand in another order"
        return None, f"{len(wrong)} rows stand in another order"
    ratio = (found * expected).sum(0) / expected.square().sum(0).clamp_min(1e-300)
    by_row = _close(found, expected * ratio, slack * (1 + float((ratio - 1).abs().max())))
    share = f"{len(wrong)} of {expected.shape[1]} rows"
    if by_row:
        one = ratio[wrong]
        if bool(within_each((one - one[0]).abs(), slack * one[0].abs()).all()):
            first = float(one[0])
            return first, f"{share} are multiplied by {factor_said(first, spacing)}"
        return None, f"{share} are multiplied, each by a number of its own"
    return None, f"{share} have other weights"


def factor_said(factor: float, spacing: float) -> str:
    """A factor in words, with the digits that weights have whose numbers are so far apart."""
    digits = min(6, math.ceil(-math.log10(spacing)))
    return f"{'about ' if digits < 6 else ''}{factor:.{digits}g}"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether every row and every token is as expected, on average over the other.

    The rounding of weights grows with what they are multiplied with: single products of a large
    activation are further off than the average, so no single one decides. Rows and tokens that are
    smaller than the average may be off by as much as that.
    """
    overall = expected.square().mean().sqrt()
    return all(
        bool(
            within_each(
                _size(found - expected, over),
                tolerance * _size(expected, over).clamp_min(overall),
            ).all()
        )
        for over in (0, 1)
    )


def _size(values: Tensor, over: int) -> Tensor:
    return values.square().mean(over).sqrt()


def _moved(expected: Tensor, found: Tensor, wrong: Tensor, tolerance: float) -> Tensor | None:
    """For rows that are wrong, those whose place they took; None if they are no others' at all."""
    if len(wrong) < 2:
        return None
    # By products of matrices, which is faster, small distances would drown in rounding.
    exactly = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(found[:, wrong].T, expected[:, wrong].T, compute_mode=exactly)
    nearest = distances.argmin(1)
    scale = expected.square().mean().sqrt() * expected.shape[0] ** 0.5
    if not bool(within_each(distances.amin(1), tolerance * scale).all()):
        return None
    return wrong[nearest]
