"""Recipes are strict, and what they say is what is done."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.planning.recipe import GrowStep, Recipe, load_recipe, shipped_recipe, shipped_recipes
from tests import motif3_reference
from tests.commands import cli
from tests.files import listed, with_tokenizer
from tests.models import Make
from tests.test_motif3 import random_model


def test_a_recipe_is_read(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(listed("recipe", "good"))
    step = GrowStep("hypercloning", {"hidden": "x2", "ffn": 96}, symmetry="keep")
    settings = Settings(prompts=2, length=16, seed=1)
    assert load_recipe(file) == Recipe("a", (step,), "b", settings, 3, shard_size="1GB")
    assert load_recipe(file, source="c", output="d").source == "c"


KINDS = {"hybrid-deeper": "qwen3"}
"""The sources of recipes that are not for Llama."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_runs(name: str, make: Make, tmp_path: Path) -> None:
    file = shipped_recipe(name)
    assert file.read_text().startswith("# ")
    differential = "diff" in name and "softmax" not in name
    kind = "diffllama" if differential else KINDS.get(name, "llama")
    if "motif-3" in name:
        source = random_model(tmp_path / "source", motif3_reference.TINY)
    else:
        source = make(kind, rms_norm_eps=1e-5)
    if name == "undo-growth":
        small, source = source, tmp_path / "grown"
        growkit.grow(small, source, hidden="x2", verify=False)
    recipe = load_recipe(file, str(source), str(tmp_path / "out"))
    assert recipe.verify == Settings(prompts=8, length=512, seed=0)
    result = growkit.run(replace(recipe, verify=Settings(prompts=2, length=64)))
    assert result["kept"] is True


def test_many_doublings_are_refused_at_once(make: Make, tmp_path: Path) -> None:
    """No map of an axis is made before it is known that there are such models."""
    steps = tuple(GrowStep("hypercloning", {"ffn": "x2"}) for _ in range(60))
    recipe = Recipe(str(make("llama")), steps, str(tmp_path / "out"))
    started = time.process_time()
    with pytest.raises(InputError, match="rows or columns"):
        growkit.run(recipe)
    assert time.process_time() - started < 5


def test_shipped_recipes_run_by_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make("llama")
    done = cli("run", "wider-mlp", "--source", source, "--output", "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["copies"] == [{"ffn": 4}]
    growkit.grow(source, "grown", ffn="x4", verify=False)
    apart, same = (load_file(Path(each) / "model.safetensors") for each in ("out", "grown"))
    assert all(same[name].equal(tensor) for name, tensor in apart.items())
    with pytest.raises(InputError, match=r"out already exists"):
        growkit.run(replace(load_recipe(Path("wider-mlp")), source=str(source), output="out"))
    Path("wider-mlp").write_text(f"source: {source}\nsteps: []\noutput: b\n")
    assert "has no steps" in cli("run", "wider-mlp").stderr  # a file of that name is meant


def test_the_proof_of_a_recipe_reads_another_text(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    recipe, out = tmp_path / "r.yaml", tmp_path / "out"
    source = with_tokenizer(make("llama", vocab_size=256))
    content = f"source: {source}\nsteps: [{{grow: hypercloning, hidden: x2}}]\noutput: {out}\n"
    recipe.write_text(content + "verify: {prompts: 1, length: 12, text: nowhere.txt}\n")
    text = tmp_path / "text.txt"
    text.write_text("A text that is long enough to be read.")
    done = cli("run", recipe, "--text", text, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    verdict = json.loads(done.stdout)["verification"]
    assert verdict["text"] == str(text)
    assert verdict["sections"]["logits"]["strict_float64"]["device"] == "cpu"
    proof = json.loads((out / "growkit.json").read_text())["recipe"]["verify"]
    assert (proof["text"], proof["device"], proof["length"]) == (text.name, "cpu", 12)
    refused = cli("run", recipe, "--text", text, "--device", "cuda", "--overwrite")
    assert "no such device" in refused.stderr
    text.unlink()
    assert "nowhere.txt cannot be read" in cli("run", recipe, "--overwrite").stderr
    again = cli("run", out, "--output", tmp_path / "again", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["verification"]["text"] is None


def test_a_manifest_means_the_defaults_of_its_time(make: Make, tmp_path: Path) -> None:
    """Former defaults hold where it records none; those of today are recorded."""
    source, recipe = make("diffllama", head_dim=8), {"output": "b", "steps": [{"convert": "dint"}]}
    for now, content in (("exact", {"growkit": "0", "recipe": recipe}), (None, recipe)):
        (tmp_path / "growkit.json").write_text(json.dumps(content))
        (step,) = load_recipe(tmp_path / "growkit.json", source=str(source)).steps
        assert step.options.get("integral_method") == now
    growkit.convert(source, tmp_path / "out", "dint", verify=False)
    (step,) = load_recipe(tmp_path / "out").steps
    assert step.options["integral_method"] == "auto"
