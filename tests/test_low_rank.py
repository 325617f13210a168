"""Low ranks: the best approximation of hard matrices, and the base of several."""

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


# --- A base for several: hardly a better one is near, and it has a size --------------------------

PROJECTIONS = {"q": HeadGroups(4, 4, "all_heads"), "k": HeadGroups(2, 2, "all_heads")}


def of_demo(layer: int, name: str) -> Tensor:
    """[members, inputs, outputs]."""
    weights = load_file(MODEL / "model.safetensors")
    weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    return PROJECTIONS[name].members(weight.double())[0]


def left(members: Tensor, base: Tensor, rank: int) -> Tensor:
    """What the best updates leave, as a part of what they leave of the mean."""
    parts = [torch.linalg.svdvals(members - b)[:, rank:].square() for b in (base, members.mean(0))]
    return parts[0].sum() / parts[1].sum()


def gained(members: Tensor, base: Tensor, rank: int) -> float:
    """What a search from a base gains on it."""
    moved = base.clone().requires_grad_()
    search = torch.optim.LBFGS([moved], max_iter=100, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        search.zero_grad()
        cost = left(members, moved, rank)
        cost.backward()
        return cost

    search.step(step)
    return float((left(members, base, rank) - left(members, moved, rank)).detach())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [2, 4, 8, 11])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_hardly_a_better_base_is_near(name: str, layer: int, rank: int) -> None:
    """The control: one is near the mean, where the turns begin."""
    members = of_demo(layer, name)
    mean, found = members.mean(0), share(members, rank).base
    assert gained(members, found, rank) < 0.05
    assert gained(members, mean, rank) > 0.06
    assert found.norm() < 3 * mean.norm()


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
