"""What low-rank updates hold of a projection."""

from __future__ import annotations

from growkit.results.result import Result

MOST_VALUES = 512
"""Singular values that are reported of a projection."""


class Spectrum(Result):
    """What low-rank updates had to hold in one projection, and what they leave over.

    Attributes:
        module: name of the projection, e.g. ``model.layers.0.self_attn.q_proj``.
        singular_values: of W₁ - W₂ for two matrices that share a base; for more, of what each of
            them is away from their mean. The root mean square of all groups, the largest first, at
            most ``MOST_VALUES``.
        rank: of the updates.
        kept: number of singular values that updates of this rank hold, 2r for two matrices.
        residual: what is left over, summed over all matrices.
        best: the least that can be left over, ½ Σ_{i>2r} σᵢ²; for more than two matrices what
            their mean as the base leaves with the best updates, which is not the least.
        unit: what residual and best are measured in.
    """

    module: str
    singular_values: list[float]
    rank: int
    kept: int
    residual: float
    best: float
    unit: str
