"""The base of more than two matrices that share one, W_k ≈ base + A_k B_kᵀ.

Whatever the base, the best updates are those of its rests W_k - base, and Σ_k Σ_{i>r} σᵢ² remains,
of which torch knows the gradient. L-BFGS descends from the mean. What remains has many least
points, and may have none: a base that grows without bound, with updates that take it away again,
can always gain a little more, as with tensors (de Silva and Lim, "Tensor rank and the ill-posedness
of the best low-rank approximation problem", 2008). So how far the base moves counts too.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_STEPS = 5000
CONVERGED = 1e-10
"""Gain of a step, as a part of what the mean leaves, below which a search ends."""

MOVED = 1e-3
"""What a base counts that moves as far as the matrices are from their mean, as a part of what the
mean leaves: enough for a search to end, little enough to lose nothing (``docs/numerics.md``)."""

REMEMBERED = 30
"""Steps from which L-BFGS knows the curvature; each takes the memory of two bases."""


def best_move(rests: Tensor, rank: int) -> tuple[Tensor, int]:
    """How the base should move from the mean, and the steps that it took to find that.

    Args:
        rests: what the mean leaves, [members, inputs, outputs], in float64.
        rank: of the updates.
    """
    unit = rests.norm().clamp(min=torch.finfo(rests.dtype).tiny)
    start = rests / unit
    mean_leaves = _left(start, rank)
    if not mean_leaves > torch.finfo(rests.dtype).eps:  # nothing but rounding, or nothing at all
        return torch.zeros_like(rests[0]), 0
    move = torch.zeros(rests.shape[1:], dtype=rests.dtype, device=rests.device, requires_grad=True)
    search = torch.optim.LBFGS(
        [move],
        max_iter=MOST_STEPS,
        history_size=REMEMBERED,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=CONVERGED,
    )

    def cost() -> float:
        search.zero_grad()
        distance = len(rests) * move.square().sum()
        whole = _left(start - move, rank) / mean_leaves + MOVED * distance
        whole.backward()
        return float(whole.detach())

    with torch.enable_grad():
        search.step(cost)
    return move.detach() * unit, search.state[move]["n_iter"]


def _left(rests: Tensor, rank: int) -> Tensor:
    """What the best updates leave of all rests together, with its derivative."""
    squares = rests.transpose(-1, -2) @ rests
    least: Tensor = torch.linalg.eigvalsh(squares)[..., : max(0, rests.shape[-1] - rank)]
    return least.sum()
