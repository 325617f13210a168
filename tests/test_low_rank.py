"""Low ranks: the best approximation of hard matrices, and the search for a base of several."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from growkit.cli.demo import MODEL
from growkit.extras.differential import low_rank
from growkit.extras.differential.low_rank import HeadGroups, share, truncated

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


@pytest.mark.sampled(24)
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


# --- The search for a base: it ends, at a least point of a base of a size -------------------------

PROJECTIONS = {"q": HeadGroups(4, 4, "all_heads"), "k": HeadGroups(2, 2, "all_heads")}


def of_demo(layer: int, name: str) -> Tensor:
    """[members, inputs, outputs]."""
    weights = load_file(MODEL / "model.safetensors")
    weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    return PROJECTIONS[name].members(weight.double())[0]


def left_after_turns(members: Tensor, base: Tensor, rank: int, turns: int) -> float:
    """The same cost after the best updates for the base, then the best base for them, by turns."""
    mean = members.mean(0)
    start = torch.linalg.svdvals(members - mean)[:, rank:].square().sum()
    weight = low_rank.MOVED * start / (members - mean).square().sum()
    for _ in range(turns):
        left, values, right = torch.linalg.svd(members - base, full_matrices=False)
        updates = left[..., :rank] * values[:, None, :rank] @ right[:, :rank]
        base = ((members - updates).mean(0) + weight * mean) / (1 + weight)
    left_over = torch.linalg.svdvals(members - base)[:, rank:].square().sum()
    moved = len(members) * (base - mean).square().sum()
    return float((left_over + weight * moved) / start)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [2, 4, 8, 11])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_it_ends_where_nothing_is_gained(name: str, layer: int, rank: int) -> None:
    members = of_demo(layer, name)
    found = share(members, rank)
    assert 0 < found.steps < low_rank.MAX_STEPS
    here = left_after_turns(members, found.base, rank, 0)
    assert here < left_after_turns(members, members.mean(0), rank, 0)
    assert here - left_after_turns(members, found.base, rank, 300) < 1e-6


def test_stopped_early_something_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(low_rank, "MAX_STEPS", 20)
    members = of_demo(1, "q")
    base = share(members, 8).base
    gained = left_after_turns(members, base, 8, 0) - left_after_turns(members, base, 8, 300)
    assert gained > 1e-3


def test_the_base_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does as soon as its size counts nothing, to gain less than a hundredth."""
    members = of_demo(0, "k")
    found = share(members, 4)
    assert found.base.norm() < 3 * members.mean(0).norm()
    monkeypatch.setattr(low_rank, "MOVED", 0.0)
    free = share(members, 4)
    assert free.base.norm() > 30 * members.mean(0).norm()
    assert free.residual > 0.99 * found.residual


@pytest.mark.parametrize("members", [3, 5, 8])
@pytest.mark.parametrize("shape", [(40, 8), (9, 12), (300, 6)])
def test_a_base_that_is_there_is_found(members: int, shape: tuple[int, int]) -> None:
    """Whatever the updates, if their rank is enough to hold them."""
    inputs, outputs = shape
    base = random(inputs, outputs)
    updates = random(members, inputs, 2, seed=1) @ random(members, 2, outputs, seed=2)
    found = share(base + updates, 2)
    assert found.residual < 1e-6 * updates.square().sum()
    mean = torch.linalg.svdvals(updates - updates.mean(0))[:, 2:].square().sum()
    assert mean > 1e-2 * updates.square().sum()
