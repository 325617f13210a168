"""The proof of the training begins with the states of the optimizers, where there are some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.cli.app import app
from growkit.proof.training import state_paths
from growkit.recipe.manifest import read_record
from growkit.training import hidden_matrices
from tests.conftest import save_model, seeded
from tests.optimizer_state import batch, grown, save_torch
from tests.training_states import LLAMA, QUICK, faults, pair, proved, spoiled, unlike


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return pair(tmp_path_factory.mktemp("trained"), amsgrad=True)


def test_it_begins_with_the_states(trained: tuple[Path, Path, Path]) -> None:
    """They lie in the source's folder, where the manifest names them, and in the target's."""
    source, _, out = trained
    arguments = ["verify", str(source), str(out), "--steps", "2", "--json"]
    found = CliRunner().invoke(app, [*arguments, "--prompts", "1", "--length", "12"])
    assert found.exit_code == 0, found.stderr
    training = json.loads(found.stdout)["training"]
    assert (
        training["begun"] == f"the optimizers' states in {source}/state.pt and {out}/optimizer.pt"
    )
    assert training["kept"]
    assert training["relative"] < training["tolerance"] < 1e-11
    assert "its optimizer's state is the source's, grown" in training["reason"]


def test_every_wrong_factor_and_moment_is_read(trained: tuple[Path, Path, Path]) -> None:
    source, state, out = trained
    assert unlike(source, out, state) == ""
    content = torch.load(out / "optimizer.pt", weights_only=True)
    assert len(content["param_groups"]) > 3
    every = list(faults(content))
    settings = [each for each in every if each[0] in ("lr of", "weight_decay of", "eps of")]
    for said, spoil in [*seeded(1).sample(settings, 3), *seeded(2).sample(every, 2), every[-1]]:
        with spoiled(out, spoil):
            assert unlike(source, out, state).startswith(said)


def test_a_wrong_moment_is_trained_with(trained: tuple[Path, Path, Path]) -> None:
    source, state, out = trained
    every = list(faults(torch.load(out / "optimizer.pt", weights_only=True)))
    moments = ("exp_avg of", "max_exp_avg_sq of")
    said, spoil = seeded(6).choice([each for each in every if each[0] in moments])
    with spoiled(out, spoil):
        proof = proved(source, out, state)
    assert proof.kept is False
    assert f"not the source's, grown: {said}" in proof.reason
    assert proof.relative is not None
    assert proof.tolerance is not None
    assert proof.relative > proof.tolerance, said


def test_random_splits_are_caught_as_well(tmp_path: Path) -> None:
    """The law does not reach them, and what was written is read all the same."""
    source, state, out = pair(tmp_path)
    growkit.grow(source, out, optimizer=state, hidden="x2", verify=False, overwrite=True)
    assert unlike(source, out, state) == ""
    said, spoil = next(faults(torch.load(out / "optimizer.pt", weights_only=True)))
    with spoiled(out, spoil):
        proof = proved(source, out, state)
    assert (proof.kept, proof.tolerance) == (False, None)
    assert said in proof.reason


@pytest.mark.parametrize("engine", ["distributed", "torch"])
def test_other_formats_begin_with_them_too(engine: str, tmp_path: Path) -> None:
    source, state, out = pair(tmp_path, engine)
    proof = proved(source, out, state)
    assert proof.kept
    assert "optimizers' states" in proof.begun


def test_states_that_are_not_tried(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A manifest has nothing read outside the two folders; what is not tried is said."""
    source, state, out = trained
    before, after = Checkpoint(source), Checkpoint(out)
    recipe = read_record(after)
    assert recipe
    assert state_paths(before, after, recipe, None).source == state
    elsewhere = replace(recipe, optimizer=f"../{tmp_path.name}")
    assert state_paths(before, after, elsewhere, None).source is None
    places = state_paths(before, after, elsewhere, None)
    assert "was not tried, as that of the source is not in its folder" in places.untried
    bare = tmp_path / "bare"
    growkit.grow(source, bare, hidden="x2", symmetry="keep", verify=False)
    assert not state_paths(before, Checkpoint(bare), read_record(Checkpoint(bare)), None).untried
    with pytest.raises(InputError, match="holds no optimizer's state that could be compared"):
        growkit.verify(source, bare, **QUICK, steps=1, optimizer=state)
    with pytest.raises(InputError, match="add --steps"):
        growkit.verify(source, out, **QUICK, optimizer=state)


def test_the_momentum_of_muon_is_compared_alone(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", **LLAMA)
    model = AutoModelForCausalLM.from_pretrained(source)
    inside = [each for name, each in model.named_parameters() if name in hidden_matrices(model)]
    optimizer = torch.optim.Muon(inside, lr=1e-2)
    model(batch(0), labels=batch(0)).loss.backward()
    optimizer.step()
    model.save_pretrained(source)
    state, out = save_torch(model, optimizer, tmp_path / "state"), tmp_path / "out"
    grown(source, state, out)
    proof = proved(source, out, state)
    assert proof.kept
    assert proof.begun == "the moments of a first batch"
    every = list(faults(torch.load(out / "optimizer.pt", weights_only=True)))
    with spoiled(out, next(spoil for said, spoil in every if said == "momentum_buffer of")):
        assert unlike(source, out, state).startswith("momentum_buffer of")
