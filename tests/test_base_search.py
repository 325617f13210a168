"""The search for the base of more than two matrices ends, at a least point of a base of a size."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from growkit.cli.demo import MODEL
from growkit.conversions.shared_diff import low_rank
from growkit.conversions.shared_diff.low_rank import share
from growkit.conversions.shared_diff.search import Heads

PROJECTIONS = {"q": Heads(4, 4, "all_heads"), "k": Heads(2, 2, "all_heads")}


def of_demo(layer: int, name: str) -> Tensor:
    """[members, inputs, outputs]."""
    weights = load_file(MODEL / "model.safetensors")
    weight = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    return PROJECTIONS[name].members(weight.double())[0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rank", [2, 4, 8, 11])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_it_ends_where_nothing_is_gained(name: str, layer: int, rank: int) -> None:
    members = of_demo(layer, name)
    found = share(members, rank)
    assert 0 < found.steps < low_rank.MOST_STEPS
    here = left_after_turns(members, found.base, rank, 0)
    assert here < left_after_turns(members, members.mean(0), rank, 0)
    assert here - left_after_turns(members, found.base, rank, 300) < 1e-6


def test_stopped_early_something_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(low_rank, "MOST_STEPS", 20)
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


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1.0, 1e8, 1e150])
def test_nothing_depends_on_the_scale(scale: float) -> None:
    weights = random(4, 30, 6)
    found, scaled = share(weights, 2), share(weights * scale, 2)
    assert torch.allclose(scaled.base / scale, found.base, rtol=1e-4, atol=1e-5)
