"""What the proof holds shared bases and low-rank updates to: every fault shows, nothing else does.

Bounded conversions lose something by name, so neither logits nor bits can judge them. The base must
be that of the updates, bit for bit, and the updates must be the best ones.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growkit
from growkit.base.errors import InputError
from growkit.engine.recipe_planning import plan_recipe
from growkit.extras.differential.low_rank import HeadGroups
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import ConvertStep, GrowStep, Recipe, Step
from growkit.proof.weights import Recovered, compare_weights
from tests.files import edit_weights, with_tokenizer
from tests.models import save_model, seeded
from tests.test_mutations import swap

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCOPES = ["head", "layer", "all_heads"]
HEAD_DIM = 8
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
HEADS |= {"head_dim": HEAD_DIM, "hidden_size": 32}


def compared(recipe: Recipe) -> Recovered:
    """What comes back from the files that a recipe has made."""
    source = Checkpoint(recipe.source)
    way = plan_recipe(recipe, source)
    return compare_weights(way.lineage, Checkpoint(recipe.output))


def made(folder: Path, source: Path, *steps: Step, dtype: str | None = None) -> Recipe:
    """A recipe that has been carried out."""
    recipe = Recipe(str(source), steps, str(folder / "target"), verify=None, dtype=dtype)
    growkit.run(recipe)
    return recipe


def most_useful(folder: Path, source: Path, *steps: Step) -> int:
    """Rank 8, or the rank that is named where 8 is refused."""
    refusal = ""
    try:
        plan_recipe(
            Recipe(str(source), steps, str(folder / "target"), verify=None), Checkpoint(source)
        )
    except InputError as error:
        refusal = str(error)
    named = re.fullmatch(r"rank 8 is useless: .*; choose at most ([1-7])", refusal)
    assert bool(named) == bool(refusal), refusal
    return int(named[1]) if named else 8


def check_sound_parts(seed: int, folder: Path) -> None:
    """Draw a model and steps, write it into a folder, and hold the proof to finding no fault."""
    choose = seeded(seed)
    scope = choose.choice(SCOPES)
    grouped = scope != "layer" and choose.random() < 0.5
    kind = "diff_transformer" if grouped else choose.choice(["diff_transformer", "diffllama"])
    config = HEADS | {"attention_bias": choose.random() < 0.5, "vocab_size": 256}
    if grouped:
        config |= {"num_attention_heads": 9, "num_noise_heads": 3, "num_key_value_heads": 6}
    source = save_model(folder / "source", kind, seed, choose.choice(DTYPES), **config)
    rank: Any = choose.choice([1, 2, 3, 4, 5, 8, "2,3"])
    options: dict[str, Any] = {"scope": scope, "rank": rank}
    calibrated = choose.random() < 0.2
    if calibrated:
        with_tokenizer(source)
        text = folder / "text.txt"
        text.write_text("Growing keeps what was learned. " * 20)
        options |= {"calibration": str(text), "shrinkage": choose.choice([0, 0.5, 1])}
    wider = GrowStep("group-diff", {"hidden": "x2"})
    before = [[], [wider], [ConvertStep("dint")]] if not grouped else [[], [wider]]
    after = [[], [wider], [GrowStep("group-diff", {"signal_heads": "x2"})]]
    if scope == "layer":
        after.pop()
    first, last = choose.choice(before), choose.choice(after)
    dtype = choose.choice([None, None, "float64"])
    if rank == 8:  # more than these heads can use, mostly; what is named instead must do
        options["rank"] = most_useful(folder, source, *first, ConvertStep("shared-diff", options))
    steps = [*first, ConvertStep("shared-diff", options), *last]
    recipe = made(folder, source, *steps, dtype=dtype)
    found = compared(recipe)
    assert found.lost is None
    assert not found.unchecked
    assert len(found.spectra) == 4
    for spectrum in found.spectra:
        assert spectrum["singular_values"] == sorted(spectrum["singular_values"], reverse=True)
        assert calibrated or spectrum["residual"] <= 1.01 * spectrum["best"] + 1e-3


MODULE = "model.layers.1.self_attn.q_proj"
BASE, DOWN, UP = (f"{MODULE}.{part}.weight" for part in ("base", "down", "up"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(120))
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: Callable[[Tensors], Any], pair: Recipe, tmp_path: Path) -> None:
    assert compared(pair).lost is None
    assert compared(spoiled(pair, tmp_path, fault)).lost == BASE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_base_that_fits_worse_updates_is_found(scope: str, pair: Recipe, tmp_path: Path) -> None:
    """Only what is left over can show it."""
    (tmp_path / "sound").mkdir()
    steps = (ConvertStep("shared-diff", {"rank": 2, "scope": scope}),)
    sound = made(tmp_path / "sound", Path(pair.source), *steps)
    weight = Checkpoint(pair.source).read(f"{MODULE}.weight").double()

    def worse(tensors: Tensors) -> None:
        tensors[UP][:, -1] = 0
        base = HeadGroups(4, 4, scope).best_base(
            weight, tensors[DOWN].double(), tensors[UP].double()
        )
        tensors[BASE] = base.to(tensors[BASE].dtype)

    assert compared(sound).lost is None
    assert compared(spoiled(sound, tmp_path, worse)).lost == BASE


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
