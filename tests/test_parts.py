"""What is large is never whole in memory, and nothing is lost between its parts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import growkit
from growkit.base.errors import InputError
from growkit.base.tensors import parts
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Spool
from growkit.engine.lending import Stored, can_stay, lend
from growkit.planning.plan import Planned
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import parse_recipe
from tests.conftest import edit_weights, seeded

Make = Callable[..., Path]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_parts_are_all_rows_once(make: Make, small_parts: int) -> None:
    checkpoint = Checkpoint(make("llama", vocab_size=seeded(1).randrange(20, 99)))
    for name, info in checkpoint.tensors.items():
        rows = parts(checkpoint, name)
        assert rows[0].start == 0
        assert rows[-1].stop == info.shape[0]
        assert all(one.stop == other.start for one, other in pairwise(rows))
        assert (len(rows) > 1) == (info.elements > small_parts)
        assert torch.cat([checkpoint.read(name, part) for part in rows]).equal(
            checkpoint.read(name)
        )


def test_a_number_that_is_none_is_found_in_the_part_that_is_read(make: Make) -> None:
    folder = make("llama")
    with edit_weights(folder) as weights:
        weights[HEAD][20, 3] = torch.nan
    checkpoint = Checkpoint(folder)
    for _ in range(2):  # what was seen to be finite does not speak for the rest
        checkpoint.read(HEAD, slice(21, 29))
        checkpoint.read(HEAD, slice(0, 10))
        checkpoint.read(HEAD, slice(10, 20))
        with pytest.raises(InputError, match=r"lm_head.* holds NaN"):
            checkpoint.read(HEAD, slice(20, 25))
        with pytest.raises(InputError, match=r"lm_head.* holds NaN"):
            checkpoint.read(HEAD)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most elements of every tensor that were read at once."""
    most: dict[str, int] = {}
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, *where: slice | None) -> Tensor:
        tensor = read(self, name, *where)
        most[name] = max(most.get(name, 0), tensor.numel())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", noted)
    return most


@pytest.mark.parametrize("tied", [False, True])
def test_a_proof_reads_large_matrices_in_parts(
    tied: bool, make: Make, tmp_path: Path, rows_read: dict[str, int], small_parts: int
) -> None:
    """As they are stored: those that grow in rows are held against the source's as a whole."""
    source = make("llama", tie_word_embeddings=tied, vocab_size=99)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    rows_read.clear()
    result = growkit.verify(source, tmp_path / "out", prompts=2, length=12, device="cpu")
    assert result["kept"]
    assert result["negative_control_caught"]
    assert result["trainability"] is not None
    assert result["trainability"]["trainable"]
    of_vocabulary = {EMBEDDING} if tied else {EMBEDDING, HEAD}
    assert {name: rows_read[name] <= small_parts for name in of_vocabulary} == dict.fromkeys(
        of_vocabulary, True
    )


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
@pytest.mark.parametrize("row", [0, 50, 98])
def test_a_bit_in_any_part_is_missed(
    name: str, row: int, make: Make, tmp_path: Path, small_parts: int
) -> None:
    source = make("llama", vocab_size=99)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    with edit_weights(tmp_path / "out") as weights:
        value = weights[name][row, 5]
        weights[name][row, 5] = torch.nextafter(value, value + 1)
    result = growkit.verify(source, tmp_path / "out", prompts=2, length=12, device="cpu")
    assert not result["kept"]
    assert result["first_lost_tensor"] == name


@pytest.mark.parametrize(
    "steps",
    [
        [{"grow": "group-diff", "hidden": "x2", "signal_heads": "x2"}],
        [{"grow": "hypercloning", "hidden": "x2", "ffn": "x3"}, {"convert": "dint"}],
        [{"convert": "motif"}],
    ],
    ids=str,
)
def test_parts_are_parts_of_the_whole(
    steps: list[dict[str, str]], make: Make, tmp_path: Path
) -> None:
    """Made and undone part by part, every tensor is what it is as a whole."""
    source = make("diffllama", vocab_size=30)
    recipe = {"source": str(source), "output": str(tmp_path / "out"), "steps": steps}
    planned: Any = Checkpoint(source)
    chance = seeded(1)
    for each in plan_recipe(parse_recipe(recipe, "recipe"), planned).lineage.plans:
        before, planned = planned, Planned(planned, each)
        for rule in each.rules:
            whole = planned.read(rule.target)
            assert (planned.cuts(rule.target) > 0) == rule.transform.local
            for _ in range(3):
                where = [slice(*sorted(chance.choices(range(n + 1), k=2))) for n in whole.shape]
                part = rule.transform.part(before, where)
                assert part.equal(whole[tuple(where)])
                assert planned.read(rule.target, where[0]).equal(whole[where[0]])
            if rule.transform.holds:
                (origin,) = rule.sources
                expected = before.read(origin)
                rows = slice(*sorted(chance.choices(range(len(expected) + 1), k=2)))
                back = rule.transform.undo(whole.__getitem__, rows)
                assert back is not None
                assert back.equal(expected[rows])
                spoiled = whole.clone()
                spoiled.view(-1)[chance.randrange(whole.numel())] += 1
                back = rule.transform.undo(spoiled.__getitem__, slice(0, len(expected)))
                assert back is None or not back.equal(expected)


class TestInBlocks:
    """A linear layer in blocks, held against the same layer as torch has it."""

    @pytest.fixture(params=[False, True], ids=["no bias", "bias"])
    def pair(self, request: pytest.FixtureRequest) -> tuple[nn.Linear, nn.Linear]:
        torch.manual_seed(0)
        whole = nn.Linear(6, 11, bias=request.param, dtype=torch.float64)
        whole.weight.data = whole.weight.data.float().double()
        other = nn.Linear(6, 11, bias=request.param, dtype=torch.float64)
        other.load_state_dict(whole.state_dict())
        stored = whole.weight.detach().float()
        lend(other, "weight", stored.__getitem__, (11, 6), torch.empty(20, dtype=torch.float64))
        return whole, other

    def test_products_and_gradients(self, pair: tuple[nn.Linear, nn.Linear]) -> None:
        found = []
        for module in pair:
            hidden = torch.linspace(-1, 1, 2 * 3 * 6, dtype=torch.float64).view(2, 3, 6)
            hidden.requires_grad_()
            product = module(hidden) + module(2 * hidden)  # twice: gradients add up
            other_use = functional.linear(module.weight, module.weight)
            (product.square().sum() + other_use.square().sum()).backward()
            gradients = [hidden.grad, *(p.grad for p in module.parameters())]
            found.append([product, other_use, torch.clone(module.weight), *gradients])
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, rtol=1e-14, atol=1e-14)

    def test_a_factor(self, pair: tuple[nn.Linear, nn.Linear]) -> None:
        whole, other = pair
        hidden = torch.ones(1, 6, dtype=torch.float64)
        lent = vars(other)["weight"]
        assert isinstance(lent, Stored)
        lent.factor = 2.0
        expected = functional.linear(hidden, 2 * whole.weight, whole.bias)
        assert torch.allclose(other(hidden), expected)
        lent.factor = 1.0
        assert torch.allclose(other(hidden), whole(hidden))

    def test_only_what_is_large_and_linear(self, make: Make, small_parts: int) -> None:
        class Special(nn.Linear):
            """Whose forward is its own."""

        info = Checkpoint(make("llama")).tensors
        large, small = info["model.layers.0.mlp.up_proj.weight"], info["model.norm.weight"]
        assert can_stay(nn.Linear(16, 24), "weight", large)
        assert not can_stay(nn.Linear(16, 1), "weight", small)
        assert not can_stay(nn.Linear(16, 24), "bias", large)
        assert not can_stay(Special(16, 24), "weight", large)
        assert not can_stay(nn.Embedding(24, 16), "weight", large)


def test_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = Spool()
    tensors = [torch.arange(5.0).double(), torch.ones(2, 3), torch.zeros(4, 4).T]
    for tensor in tensors:
        spool.append(tensor)
    assert len(spool) == 3
    for index in (0, 1, 2, -1, -3):
        assert spool[index].equal(tensors[index])
        assert spool[index].dtype == tensors[index].dtype
    with pytest.raises(IndexError):
        spool[3]
    assert list(tmp_path.iterdir())
    del spool
    gc.collect()
    assert not list(tmp_path.iterdir())
