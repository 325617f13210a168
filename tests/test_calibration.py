"""Low ranks weighed by what a text makes projections read, held against other ways to find them.

The weighted optimum is judged by whitening and torch's own singular values, second moments by hooks
on models that transformers runs whole.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from growkit.base.tensors import Weights
from growkit.engine.strict import strict_float64
from growkit.extras.calibration import Calibration
from growkit.extras.differential import low_rank
from growkit.extras.differential.layouts import read_layout
from growkit.extras.differential.low_rank import Shared, share, spread, truncated
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.plan import Planned
from tests.files import listed
from tests.models import Make, close, load_strict, seeded
from tests.test_low_rank import random

INPUTS, OUTPUTS = 24, 8


def read(tokens: int, steepness: float = 2.0, seed: int = 7) -> Tensor:
    """What a projection reads, [tokens, INPUTS]: some directions much more than others."""
    mixing = torch.linalg.qr(random(INPUTS, INPUTS, seed=seed + 1)).Q
    scales = torch.logspace(0, -steepness, INPUTS, dtype=torch.float64)
    return random(tokens, INPUTS, seed=seed) * scales @ mixing


def weighted(rest: Tensor, inputs: Tensor) -> Tensor:
    """tr Rᵀ C R of every matrix, as what the outputs differ by on these inputs."""
    return (inputs @ rest).square().sum((-1, -2))


def rest_of(members: Tensor, found: Shared) -> Tensor:
    return members - found.base[..., None, :, :] - found.down @ found.up.transpose(-1, -2)


def left_by(members: Tensor, found: Shared, inputs: Tensor) -> Tensor:
    return weighted(rest_of(members, found), inputs).sum(-1)


def by_whitening(first: Tensor, second: Tensor, rank: int, root: Tensor) -> tuple[Tensor, Tensor]:
    """Whiten the difference, cut it off, undo the whitening: the difference of the updates."""
    left, values, right = torch.linalg.svd(root @ (first - second), full_matrices=False)
    kept = slice(0, 2 * rank)
    cut = torch.linalg.solve(
        root, left[..., :, kept] * values[..., None, kept] @ right[..., kept, :]
    )
    return cut, values[..., 2 * rank :].square().sum(-1) / 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["cholesky", "eigh", "unweighed"])
@pytest.mark.parametrize("steepness", [0.0, 2.0, 4.0])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_weighted_optimum_is_that_of_whitening(way: str, steepness: float, rank: int) -> None:
    inputs, members = read(200, steepness), random(3, 2, INPUTS, OUTPUTS)
    moment = inputs.T @ inputs
    if way == "unweighed":
        moment, inputs = None, torch.eye(INPUTS).double()
        root = inputs
    elif way == "cholesky":
        root = torch.linalg.cholesky(moment).T
    else:
        values, vectors = torch.linalg.eigh(moment)
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cut, best = by_whitening(*members.unbind(1), rank, root)
    found = share(members, rank, moment)
    assert torch.allclose(found.residual, best, rtol=1e-9, atol=0)
    assert torch.allclose(left_by(members, found, inputs), best, rtol=1e-9, atol=0)
    updates = found.down @ found.up.transpose(-1, -2)
    assert torch.allclose(updates[:, 0] - updates[:, 1], cut, rtol=0, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 3, 10, INPUTS - 1])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fewer_tokens_than_inputs(tokens: int, rank: int) -> None:
    """C is singular: what a text never shows counts nothing, what it shows is kept as well."""
    inputs, members = read(tokens), random(3, 2, INPUTS, OUTPUTS)
    found, plain = share(members, rank, inputs.T @ inputs), share(members, rank)
    shown = torch.linalg.svdvals(inputs @ (members[:, 0] - members[:, 1]))
    best = shown[:, 2 * rank :].square().sum(-1) / 2
    noise = 1e-13 * shown[:, 0].square()
    for left in (found.residual, left_by(members, found, inputs)):
        assert ((left - best).abs() <= 1e-9 * best + noise).all()
    assert (left_by(members, found, inputs) <= left_by(members, plain, inputs) + noise).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [1, 3, OUTPUTS])
@pytest.mark.parametrize("weigh", [False, True])
def test_turns_never_lose(weigh: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many; nor does any of a batch, one of which needs none."""
    inputs, weights = read(200), random(3, 4, INPUTS, OUTPUTS)
    weights[1] = weights[1, 0]
    moment = inputs.T @ inputs if weigh else None
    rests = weights - weights.mean(1, keepdim=True)
    start = torch.linalg.svdvals(inputs @ rests if weigh else rests)[..., rank:].square()
    for turns in (1, 3, 20, low_rank.TURNS):
        monkeypatch.setattr(low_rank, "TURNS", turns)
        found = share(weights, rank, moment)
        left = rest_of(weights, found)
        size = (weighted(left, inputs) if weigh else left.square().sum((-1, -2))).sum(-1)
        noise = 1e-13 * spread(weights, moment)[0]
        assert ((size - found.residual).abs() <= 1e-9 * found.residual + noise).all()
        assert (size <= start.sum((-1, -2)) * (1 + 1e-12) + noise).all()
    assert rank == OUTPUTS or (size < 0.99 * start.sum((-1, -2)))[[0, 2]].all()


def test_nothing_read_is_nothing_lost() -> None:
    """A text may not reach a projection at all; what is found is finite all the same."""
    for members in (2, 3):
        found = share(random(members, INPUTS, OUTPUTS), 2, torch.zeros(INPUTS, INPUTS).double())
        assert found.residual == 0
        assert found.base.isfinite().all()
        assert found.down.isfinite().all()
    assert not truncated(torch.zeros(INPUTS, OUTPUTS).double(), 2, torch.eye(INPUTS).double())[
        2
    ].any()


def windows(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(29, (n,), generator=generator) for n in range(9, 9 + count)]


def by_hooks(folder: Path, texts: Sequence[Tensor]) -> list[Tensor]:
    """Second moments of what q_proj reads in every layer, on the model as transformers runs it."""
    model = load_strict(folder)
    moments: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):

        def look(module: Any, args: tuple[Tensor, ...], index: int = index) -> None:
            for token in args[0][0]:
                moments[index] = moments.get(index, torch.tensor(0.0)) + torch.outer(token, token)

        layer.self_attn.q_proj.register_forward_pre_hook(look)
    with strict_float64(), torch.no_grad():
        for ids in texts:
            model(ids[None], use_cache=False)
    return [moments[index] for index in range(len(moments))]


def as_read(folder: Path) -> Weights:
    checkpoint = Checkpoint(folder)
    if checkpoint.config["model_type"] == "diff_transformer":
        return checkpoint
    return Planned(checkpoint, read_layout(checkpoint))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = listed("calibration", "variants")


@pytest.fixture(params=VARIANTS)
def folder(request: pytest.FixtureRequest, make: Make) -> Path:
    kind, options = VARIANTS[request.param]
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "dtype": torch.float64}
    if kind == "diff_transformer":
        sizes["num_key_value_heads"] = None
    return make(kind, **(sizes | options))


class Strict(Calibration):
    """One that runs in strict float64: the judge does so as well, and casts to float32 differ."""

    def moment(self, layer: int, shrinkage: float = 0.0) -> Tensor:
        with strict_float64():
            return super().moment(layer, shrinkage)


@pytest.mark.sampled(2)
def test_moments_are_those_of_the_real_class(folder: Path) -> None:
    """In any order, and again."""
    expected = by_hooks(folder, windows())
    calibration = Strict(as_read(folder), windows())
    order = seeded(len(folder.name)).choices(range(4), k=6)
    for layer in [0, 0, *order]:
        assert close(calibration.moment(layer), expected[layer]), (order, layer)
        assert calibration.moment(layer).dtype == torch.float64
    others = by_hooks(folder, windows(2))
    assert not close(calibration.moment(1), others[1], 1e-3)  # the control: other text
