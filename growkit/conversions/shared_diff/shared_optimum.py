"""Shared bases with low-rank updates held against the best there are.

What is compared is squared Frobenius norms of what is left over, group by group. The optimum comes
from torch's singular values alone, not from ``low_rank``, which is under proof.
``docs/numerics.md`` derives what rounding explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.conversions.shared_diff.shared_projection import Heads


@dataclass(frozen=True)
class Held:
    """Parts of a projection, held against the optimum.

    Attributes:
        values: singular values of the difference of two members, or of what more of them are away
            from their mean; the root mean square of all groups, in falling order.
        kept: number of these that updates of this rank hold.
        residual: what is left over, [groups].
        best: the least that can be left over, [groups]; for more than two members what their mean
            as the base leaves with the best updates.
        rounding: how much larger than that of the best rounding may make the norm, [groups].
    """

    values: Tensor
    kept: int
    residual: Tensor
    best: Tensor
    rounding: Tensor

    @property
    def optimal(self) -> bool:
        """Whether no group leaves over more than rounding explains."""
        return bool((self.residual.sqrt() <= self.best.sqrt() + self.rounding).all())


def hold_against_optimum(
    heads: Heads, weight: Tensor, base: Tensor, down: Tensor, up: Tensor
) -> Held:
    """Compare parts with the best ones.

    Args:
        heads: the heads of the projection.
        weight: the full projection, [(signal + noise) · head_dim, hidden].
        base: as stored, in the dtype it was rounded to.
        down: likewise.
        up: likewise.
    """
    whole = weight.double()
    rests = heads.members(whole - heads.multiplied_out(base.double(), down.double(), up.double()))
    members = heads.members(whole)
    values, best = _optimum(members, up.shape[1])
    # Of a QR factorisation in float64, by far the largest error there is.
    float64 = rests.shape[-2] * rests.shape[-1] * torch.finfo(torch.float64).eps * _norm(members)
    return Held(
        values=values.flatten(0, -2).square().mean(0).sqrt(),
        kept=min(values.shape[-1], up.shape[1] * (2 if members.shape[1] == 2 else 1)),
        residual=_norm(rests).square(),
        best=best,
        rounding=_rounding(heads, base, down, up) + float64,
    )


def _optimum(members: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Singular values, and what the best parts of this rank leave over, [groups].

    Of more than two members that is not known, but the search begins with their mean as the base.
    """
    if members.shape[1] == 2:
        values = torch.linalg.svdvals(members[:, 0] - members[:, 1])
        return values, values[:, 2 * rank :].square().sum(-1) / 2
    values = torch.linalg.svdvals(members - members.mean(1, keepdim=True))
    return values, values[..., rank:].square().sum((-1, -2))


def _rounding(heads: Heads, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The most that rounding the parts to their dtypes adds to the norm of the rests, [groups]."""
    of_base, of_down, of_up = (_half_step(part) for part in (base, down, up))
    wide, tall = down.double().abs(), up.double().abs()
    nothing = torch.zeros_like(of_base)
    updates = heads.multiplied_out(nothing, of_down, tall + of_up)
    updates += heads.multiplied_out(nothing, wide, of_up)
    bases = heads.multiplied_out(of_base, torch.zeros_like(wide), tall)
    return _norm(heads.members(updates)) + _norm(heads.members(bases))


def _half_step(rounded: Tensor) -> Tensor:
    """How far the numbers can be from what was rounded to them."""
    of = torch.finfo(rounded.dtype)
    return of.eps / 2 * (rounded.double().abs() + of.smallest_normal)


def _norm(members: Tensor) -> Tensor:
    """Frobenius norm of all members together, [groups]."""
    return members.square().sum((-1, -2, -3)).sqrt()
