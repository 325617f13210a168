"""The best approximation of a rank, of matrices that are hard to approximate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from growkit.conversions.shared_diff import low_rank
from growkit.conversions.shared_diff.low_rank import share, truncated

INPUTS, OUTPUTS = 300, 24
EXACT = 1e-14
"""Of the largest singular value."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_values(values: Tensor) -> Tensor:
    """A matrix with these singular values."""
    left = torch.linalg.qr(random(INPUTS, len(values), seed=1)).Q
    right = torch.linalg.qr(random(OUTPUTS, len(values), seed=2)).Q
    return left * values @ right.T


MATRICES = {
    "random": random(INPUTS, OUTPUTS),
    "condition 90": of_values(torch.logspace(0, -1.95, OUTPUTS, dtype=torch.float64)),
    "condition 1e5": of_values(torch.logspace(0, -5, OUTPUTS, dtype=torch.float64)),
    "condition 1e14": of_values(torch.logspace(0, -14, OUTPUTS, dtype=torch.float64)),
    "one large": of_values(torch.tensor([1.0] + [1e-7] * (OUTPUTS - 1), dtype=torch.float64)),
    "equal values": of_values(torch.ones(OUTPUTS, dtype=torch.float64)),
    "rank 5": of_values(torch.ones(5, dtype=torch.float64)),
    "rank 5, condition 1e12": of_values(torch.logspace(0, -12, 5, dtype=torch.float64)),
    "zeros": torch.zeros(INPUTS, OUTPUTS, dtype=torch.float64),
    "duplicated columns": random(INPUTS, OUTPUTS // 2).repeat(1, 2),
    "scaled columns": random(INPUTS, OUTPUTS) * torch.logspace(-9, 9, OUTPUTS, dtype=torch.float64),
    "one column": torch.eye(INPUTS, OUTPUTS, dtype=torch.float64)
    * torch.eye(OUTPUTS, dtype=torch.float64)[0],
    "overflowing squares": random(INPUTS, OUTPUTS) * 1e200,
    "underflowing squares": random(INPUTS, OUTPUTS) * 1e-160,
    "square": random(OUTPUTS, OUTPUTS),
    "wide": random(OUTPUTS // 2, OUTPUTS),
}
RANKS = [1, 5, 12, OUTPUTS - 1, OUTPUTS, OUTPUTS + 3]


def is_best(matrix: Tensor, rank: int) -> bool:
    """Whether the approximation is as good as can be, and balanced, and the values are right."""
    largest = matrix.abs().max()
    # Scaled, so that squares are not too large for the test itself.
    unit = torch.where(largest > 0, 1 / largest, 1)
    down, up, values = truncated(matrix, rank)
    expected = torch.linalg.svdvals(matrix * unit)
    noise = EXACT * expected[0]
    rest = (matrix * unit - (down * unit) @ up.T).norm()
    best = expected[rank:].norm()
    root = torch.nn.functional.pad(values, (0, max(0, rank - len(values))))[:rank].sqrt()
    known = root.square() * unit > 1e-8 * expected[0]
    columns = torch.stack([down.norm(dim=0), up.norm(dim=0)])[:, known]
    return bool(
        ((values * unit - expected).abs() <= noise).all()
        and (values.diff() <= 0).all()
        and rest <= best * (1 + 1e-11) + noise
        and torch.allclose(columns, root[known].expand(2, -1), rtol=1e-6, atol=0)
        and down.isfinite().all()
        and (down.norm(dim=0) <= 2 * matrix.norm().sqrt()).all()
    )


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", MATRICES)
def test_the_approximation_is_the_best(kind: str, rank: int) -> None:
    assert is_best(MATRICES[kind], rank)


def test_squares_alone_are_not_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the way for hard matrices the test above fails, on those alone."""
    monkeypatch.setattr(low_rank, "WELL_CONDITIONED", float("-inf"))
    monkeypatch.setattr(low_rank, "UNDERFLOW", float("-inf"))
    failing = {
        kind for kind, matrix in MATRICES.items() if not all(is_best(matrix, r) for r in RANKS)
    }
    assert {"condition 1e14", "one large", "rank 5", "overflowing squares"} <= failing
    assert not {"random", "condition 90", "equal values", "zeros", "square", "wide"} & failing


def test_a_batch_is_its_matrices_one_by_one() -> None:
    """Each goes its own way, in a batch of any shape."""
    tall = [matrix for matrix in MATRICES.values() if matrix.shape == (INPUTS, OUTPUTS)][:12]
    together = truncated(torch.stack(tall).view(2, 3, 2, INPUTS, OUTPUTS), 7)
    down, up, values = (part.flatten(0, 2) for part in together)
    for index, matrix in enumerate(tall):
        alone = truncated(matrix, 7)
        assert torch.allclose(values[index], alone[2], rtol=0, atol=EXACT * float(alone[2][0]))
        products = [down[index] @ up[index].T, alone[0] @ alone[1].T]
        if float(alone[2][6] - alone[2][7]) > 1e-8 * float(alone[2][0]):  # else none is the best
            assert torch.allclose(*products, rtol=0, atol=1e-12 * float(alone[2][0]))


@pytest.mark.parametrize("kind", MATRICES)
def test_a_pair_of_enough_rank_is_held_exactly(kind: str) -> None:
    first = random(*MATRICES[kind].shape, seed=3) * MATRICES[kind].abs().max()
    members = torch.stack([first, first - MATRICES[kind]])
    found = share(members, OUTPUTS // 2)
    rebuilt = found.base + found.down @ found.up.transpose(-1, -2)
    assert (rebuilt - members).abs().max() <= EXACT * OUTPUTS * members.abs().max()
    assert found.residual == 0
