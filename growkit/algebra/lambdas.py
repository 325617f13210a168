"""λ of a layer: the same number from other vectors.

λ = exp(λq1·λk1) - exp(λq2·λk2) + λ_init (arXiv 2410.05258, eq. 2). A layout that computes λ_init
from the layer's index has another λ_init than the one a model was trained with; its vectors must
then be solved again, so that λ stays what it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from growkit.base.limits import within

ENOUGH = 2.0**-52
"""Relative error of a dot product that is as good as none."""


def lambda_value(vectors: list[Tensor], lambda_init: float) -> float:
    """λ in float64.

    Args:
        vectors: λq1, λk1, λq2 and λk2, each [head_dim].
        lambda_init: of the layer.
    """
    q1, k1, q2, k2 = (vector.double() for vector in vectors)
    return math.exp(float(q1 @ k1)) - math.exp(float(q2 @ k2)) + lambda_init


def solve_lambda(vectors: list[Tensor], lambda_init: float, new_lambda_init: float) -> list[Tensor]:
    """Vectors whose λ under another λ_init is the same.

    One of the two exponentials grows by the difference, so that its logarithm exists; of its
    vectors the query is changed along the key, which is the smallest change there is.

    Args:
        vectors: λq1, λk1, λq2 and λk2, each [head_dim].
        lambda_init: that they were made for.
        new_lambda_init: that they are to be used with.

    Returns:
        The four vectors in their dtype. The dot product, taken in float64, is right to float64's
        rounding as far as the dtype and head_dim allow.
    """
    difference = lambda_init - new_lambda_init
    if difference == 0:
        return vectors
    q1, k1, q2, k2 = vectors
    if difference > 0:
        return [*_with_dot(q1, k1, math.log(_exp_dot(q1, k1) + difference)), q2, k2]
    return [q1, k1, *_with_dot(q2, k2, math.log(_exp_dot(q2, k2) - difference))]


def _exp_dot(query: Tensor, key: Tensor) -> float:
    return math.exp(float(query.double() @ key.double()))


def _with_dot(query: Tensor, key: Tensor, dot: float) -> tuple[Tensor, Tensor]:
    """Nearby vectors of the same dtype with this dot product.

    Rounding the query leaves an error. It is made up for by coordinates that are given up one after
    the other: each takes what is still missing, divided by its key, and leaves an error that is
    smaller by the precision of the dtype.
    """
    dtype = query.dtype
    key = key.double()
    if not bool(key.square().sum()):
        key = torch.full_like(key, math.sqrt(max(abs(dot), 1e-3) / len(key))).to(dtype).double()
    direction = key * ((dot - float(query.double() @ key)) / float(key.square().sum()))
    exact = query.double() + direction
    # Those that matter least are given up, but none with a key of nothing.
    usable = [i for i in (exact * key).abs().argsort().tolist() if bool(key[i])]
    best = exact.to(dtype)
    for count in range(len(usable)):
        spare = usable[:count]
        others = exact.clone()
        others[spare] = 0
        if float(others @ key):
            others *= dot / float(others @ key)
        rounded = others.to(dtype).double()
        for index in reversed(spare):
            rounded[index] = ((dot - float(rounded @ key)) / key[index]).to(dtype).double()
        if _error(rounded, key, dot) < _error(best.double(), key, dot):
            best = rounded.to(dtype)
        if within(_error(best.double(), key, dot), ENOUGH * max(abs(dot), 1e-3)):
            break
    return best, key.to(dtype)


def _error(query: Tensor, key: Tensor, dot: float) -> float:
    return abs(float(query @ key) - dot)
