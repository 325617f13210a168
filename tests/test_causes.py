"""The cause of a difference is read off the tensor at fault, also in narrow dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from growkit.proof.localisation import cause_of, factor_sentence

SPACINGS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
ROWS, COLUMNS, HEAD_DIM = 96, 64, 8


def cause(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> tuple[float | None, str]:
    """The cause for a matrix that was changed and stored again, read in three blocks."""
    numbers = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, COLUMNS, generator=numbers, dtype=torch.float64).to(dtype)
    stored = change(weights.double()).to(dtype)
    blocks = zip(weights.split(40), stored.split(40), strict=True)
    factor, found = cause_of(blocks, SPACINGS[dtype], head_dim=HEAD_DIM)
    assert found is not None
    return factor, found


def other(weights: Tensor, rows: slice) -> Tensor:
    """Some rows of another matrix."""
    changed = weights.clone()
    changed[rows] = weights[rows].flip(1)
    return changed


@pytest.mark.parametrize(
    ("dtype", "factor", "sentence"),
    [
        (torch.bfloat16, 1.01, "about 1.01"),
        (torch.bfloat16, 0.95, "about 0.95"),
        (torch.bfloat16, -3.0, "about -3"),
        (torch.float16, 1.01, "about 1.01"),
        (torch.float32, 1.001, "1.001"),
    ],
)
def test_a_factor(dtype: torch.dtype, factor: float, sentence: str) -> None:
    found, of_all = cause(dtype, lambda weights: weights * factor)
    assert found == pytest.approx(factor, rel=SPACINGS[dtype] / 4)
    assert of_all == f"everything is multiplied by {sentence}"
    found, of_some = cause(dtype, lambda w: torch.cat([w[:32] * factor, w[32:]]))
    assert found == pytest.approx(factor, rel=SPACINGS[dtype])
    assert of_some == f"32 of 96 rows are multiplied by {sentence}"


@pytest.mark.parametrize("dtype", SPACINGS)
def test_other_causes(dtype: torch.dtype) -> None:
    """Also the control: no factor is reported where one row is not multiplied by it."""
    order = torch.arange(ROWS)
    inside = order.view(-1, 2, HEAD_DIM // 2).transpose(1, 2).flatten()
    heads = order.view(-1, HEAD_DIM).flip(0).flatten()
    of_its_own = torch.linspace(2, 3, ROWS, dtype=torch.float64)[:, None]
    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda w: other(w, slice(0, 96)), "96 of 96 rows have other weights"),
        (lambda w: other(w, slice(5, 6)), "1 of 96 rows have other weights"),
        (lambda w: other(w * 1.05, slice(5, 6)), "96 of 96 rows have other weights"),
        (lambda w: w * of_its_own, "everything is multiplied, each by a number of its own"),
        (lambda w: w[inside], "rows inside heads are in another order, as in RoPE layouts"),
        (lambda w: w[heads], "heads are in another order"),
        (lambda w: w.roll(3, 0), "96 rows are in another order"),
    ]
    for change, sentence in cases:
        assert cause(dtype, change) == (None, sentence)


def test_a_vector_and_sound_rows() -> None:
    vector = torch.linspace(1, 2, 9)
    assert cause_of([(vector, vector)], 2.0**-23) == (None, None)
    assert cause_of([(vector, 1.5 * vector)], 2.0**-23)[0] == pytest.approx(1.5)
    assert cause_of([(vector, vector.flip(0))], 2.0**-23) == (None, "it has other weights")


def test_digits_are_those_that_weights_have() -> None:
    sentences = [factor_sentence(1.00953053, spacing) for spacing in SPACINGS.values()]
    assert sentences == ["about 1.01", "about 1.01", "1.00953"]
