"""The cause of a difference is named from what a component hands on, also in narrow dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from growkit.proof.localisation import ComponentOutput, cause_of, factor_said

SPACINGS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
TOLERANCE = 1e-12


def told(
    dtype: torch.dtype, change: Callable[[Tensor], Tensor], spread: float = 2.0, tokens: int = 64
) -> tuple[float | None, str | None]:
    """What is said of a matrix that was changed and stored again.

    Args:
        dtype: that it is stored in.
        change: what was done to it, rows first.
        spread: of the sizes of activations, of which trained models have a few large ones.
        tokens: how many were looked at.
    """
    numbers = torch.Generator().manual_seed(0)
    weights = torch.randn(96, 64, generator=numbers, dtype=torch.float64).to(dtype)
    given = torch.randn(tokens, 64, generator=numbers, dtype=torch.float64)
    given *= (spread * torch.randn(64, generator=numbers, dtype=torch.float64)).exp()
    stored = change(weights.double()).to(dtype)
    part = ComponentOutput("mlp", "m", given @ weights.double().T, given @ stored.double().T, 1)
    return cause_of(part, TOLERANCE, SPACINGS[dtype])


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(
    ("dtype", "factor", "said"),
    [
        (torch.bfloat16, 1.01, "about 1.01"),
        (torch.bfloat16, 0.95, "about 0.95"),
        (torch.bfloat16, -3.0, "about -3"),
        (torch.float16, 1.01, "about 1.01"),
        (torch.float32, 1.001, "1.001"),
    ],
)
def test_a_factor_is_seen_through_rounding(
    dtype: torch.dtype, factor: float, said: str, spread: float
) -> None:
    found, cause = told(dtype, lambda weights: weights * factor, spread)
    assert found == pytest.approx(factor, rel=SPACINGS[dtype] / 4)
    assert cause == f"everything is multiplied by {said}"
    of_some, cause = told(dtype, lambda w: torch.cat([w[:32] * factor, w[32:]]), spread)
    assert of_some == pytest.approx(factor, rel=SPACINGS[dtype])
    assert cause is not None
    assert cause.startswith("32 of 96 rows are multiplied by")


def test_digits_are_those_that_weights_have() -> None:
    said = [factor_said(1.00953053, spacing) for spacing in SPACINGS.values()]
    assert said == ["about 1.01", "about 1.01", "1.00953"]


def other(weights: Tensor, rows: slice) -> Tensor:
    """Some rows of another matrix."""
    changed = weights.clone()
    changed[rows] = weights[rows].flip(1)
    return changed


@pytest.mark.parametrize("dtype", SPACINGS)
def test_what_is_no_factor_is_not_called_one(dtype: torch.dtype) -> None:
    assert told(dtype, lambda w: other(w, slice(0, 96)))[1] == "96 of 96 rows have other weights"
    assert told(dtype, lambda w: other(w, slice(5, 6)))[1] == "1 of 96 rows have other weights"
    factor, cause = told(dtype, lambda w: other(w * 1.05, slice(5, 6)))
    assert factor is None
    assert cause == "96 of 96 rows have other weights"
