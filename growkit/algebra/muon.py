"""What Muon's rate becomes for a matrix that is tiled (``torch/optim/_muon.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable

ADJUSTMENTS: dict[str, Callable[[float, float], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""What ``torch.optim.Muon`` multiplies the rate of a matrix with, by ``adjust_lr_fn``."""


def muon_rate(
    times: float, n_in: float, n_out: float, shape: tuple[int, int], adjust_lr_fn: str
) -> float:
    """What Muon's rate is multiplied by.

    A matrix tiled a × b times is orthogonalised to the tiled one's share 1/√(a·b), and torch
    multiplies with a number of its own for the larger shape.

    Args:
        times: what the weights are multiplied by, beside being split.
        n_in: into how many parts they are split.
        n_out: among how many copies their gradients are shared.
        shape: [rows, columns] of the grown matrix.
        adjust_lr_fn: that of Muon.
    """
    rows, columns = shape
    adjusted = ADJUSTMENTS[adjust_lr_fn]
    before = adjusted(rows / n_out, columns / n_in)
    return times * math.sqrt(n_out / n_in) * before / adjusted(rows, columns)
