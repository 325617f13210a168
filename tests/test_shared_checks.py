"""What the proof holds shared bases and low-rank updates to: every fault shows, nothing else does.

Bounded conversions lose something by name, so neither logits nor bits can judge them. The base must
be that of the updates, bit for bit, and the updates must be the best ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.conversions.low_rank import Heads
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.planning.layouts import read_layout
from growkit.planning.plan import Plan, Planned
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import ConvertStep, GrowStep, Recipe
from tests.conftest import edit_weights, save_model
from tests.sound_parts import DTYPES, HEAD_DIM, HEADS, SCOPES, check_sound_parts, compared, made
from tests.test_mutations import swap

MODULE = "model.layers.1.self_attn.q_proj"
BASE, DOWN, UP = (f"{MODULE}.{part}.weight" for part in ("base", "down", "up"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(60))  # ``python -m tests.sound_parts`` takes more
def test_sound_parts_raise_no_alarm(seed: int, tmp_path: Path) -> None:
    check_sound_parts(seed, tmp_path)


Tensors = dict[str, Tensor]


def change_an_element(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[flat.abs().argmax()] *= 1.01


def exchange(tensors: Tensors, *names: str) -> None:
    """Exchange the parts of two heads."""
    for name in names:
        swap(tensors[name], tensors[name].shape[0] // {BASE: 4, DOWN: 8, UP: 8}[name], 0, 1)


FAULTS: list[Callable[[Tensors], Any]] = [
    *(lambda t, name=name: t[name][2].zero_() for name in (BASE, DOWN, UP)),
    *(lambda t, name=name: change_an_element(t[name]) for name in (BASE, DOWN, UP)),
    *(lambda t, name=name: exchange(t, name) for name in (BASE, DOWN, UP)),
    lambda t: exchange(t, DOWN, UP),
    lambda t: t[UP][:, -1].zero_(),
]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A model of four pairs of heads with updates of rank 2."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diff_transformer", 0, request.param, **HEADS)
    return made(folder, source, ConvertStep("shared-diff", {"rank": 2}))


def spoiled(pair: Recipe, folder: Path, spoil: Callable[[Tensors], Any]) -> Recipe:
    """The same with a fault in its files."""
    target = shutil.copytree(pair.output, folder / "target")
    with edit_weights(target) as tensors:
        spoil(tensors)
    return replace(pair, output=str(target))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: Callable[[Tensors], Any], pair: Recipe, tmp_path: Path) -> None:
    assert compared(pair).lost is None
    assert compared(spoiled(pair, tmp_path, fault)).lost == BASE


@pytest.mark.parametrize("scope", SCOPES)
def test_a_base_that_fits_worse_updates_is_found(scope: str, pair: Recipe, tmp_path: Path) -> None:
    """Only what is left over can show it."""
    (tmp_path / "sound").mkdir()
    steps = (ConvertStep("shared-diff", {"rank": 2, "scope": scope}),)
    sound = made(tmp_path / "sound", Path(pair.source), *steps)
    weight = Checkpoint(pair.source).read(f"{MODULE}.weight").double()

    def worse(tensors: Tensors) -> None:
        tensors[UP][:, -1] = 0
        base = Heads(4, 4, scope).best_base(weight, tensors[DOWN].double(), tensors[UP].double())
        tensors[BASE] = base.to(tensors[BASE].dtype)

    assert compared(sound).lost is None
    assert compared(spoiled(sound, tmp_path, worse)).lost == BASE


def test_faults_are_found_through_later_steps(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama", 0, **HEADS)
    wider = GrowStep("group-diff", {"hidden": "x2"})
    recipe = made(tmp_path, source, wider, ConvertStep("shared-diff", {"rank": 2}), wider)
    for name in (BASE, DOWN, UP):
        wrong = spoiled(recipe, tmp_path / name, lambda t, name=name: t[name][0].mul_(2))
        assert compared(wrong).lost == BASE


def test_what_is_left_over_is_reported(pair: Recipe) -> None:
    first = compared(pair).spectra[0]
    weight = Checkpoint(pair.source).read("model.layers.0.self_attn.q_proj.weight").double()
    signal, noise = weight.view(2, 4, HEAD_DIM, -1)
    values = torch.linalg.svdvals(signal - noise)
    assert first["module"] == "model.layers.0.self_attn.q_proj"
    assert first["rank"] == 2
    assert first["best"] == pytest.approx(float(values[:, 4:].square().sum() / 2))
    assert first["residual"] == pytest.approx(first["best"], rel=0.01)
    assert first["kept"] == 4
    assert first["singular_values"] == pytest.approx(values.square().mean(0).sqrt().tolist())


def test_what_was_computed_once_more_is_not_said_to_be_checked(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama", 0, **HEADS)
    recipe = made(tmp_path, source, ConvertStep("shared-diff", {"rank": 2}), ConvertStep("diff"))
    assert BASE in compared(recipe).unchecked


def test_a_tensor_that_is_not_repeatable_needs_a_check(tmp_path: Path) -> None:
    source = Checkpoint(save_model(tmp_path / "source", "diffllama", 0, **HEADS))
    steps = (ConvertStep("shared-diff", {"rank": 2}),)
    plan: Plan = plan_recipe(Recipe("source", steps, "target"), source).lineage.plans[-1]
    read = Planned(source, read_layout(source))
    unused = plan.dropped, plan.duplicates
    made = {rule.target: rule.transform for rule in plan.rules}
    Plan.checked(read, DIFF, plan.config, made, unused=unused, checks=plan.checks)
    with pytest.raises(AssertionError, match="unchecked"):
        Plan.checked(read, DIFF, plan.config, made, unused=unused)
