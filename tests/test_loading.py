"""Models that are grown while they load; ``python -m tests.loading`` tries all of it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.base.tensors import slabs
from growkit.distributed import GrownStorageReader
from growkit.distributed.grown import Grown
from tests import loading
from tests.conftest import edit_weights, save_model
from tests.loading import differing


def recipe_of(folder: Path, source: Path, *steps: growkit.GrowStep | growkit.ConvertStep) -> Any:
    return growkit.Recipe(str(source), steps, str(folder / "out"), verify=None)


QUICK = growkit.Settings(prompts=1, length=8)
WIDER = growkit.GrowStep("hypercloning", {"hidden": "x2"})


def test_four_processes_load_what_one_has_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through both libraries, with an optimizer; a misplaced shard is noticed."""
    monkeypatch.setattr(sys, "argv", ["loading", "--sample"])
    assert loading.main() == 0
    assert capsys.readouterr().out.count("none") == 5


def test_a_model_loads_in_one_process(tmp_path: Path) -> None:
    """Models with code of their own, and in a wider dtype."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    recipe = recipe_of(tmp_path, source, WIDER, growkit.ConvertStep("diff-v2"))
    growkit.run(recipe)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not differing(growkit.load(recipe).state_dict(), expected)
    wide = growkit.load(recipe, dtype=torch.float32).state_dict()
    assert not differing(wide, {name: each.float() for name, each in expected.items()})


@pytest.mark.parametrize("settings", [{"eos_token_id": 7, "repetition_penalty": 2.0}, None])
def test_settings_of_generation_are_those_of_the_proof(
    settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    """They are loaded with the model, so another source must have the same."""
    source = save_model(tmp_path / "source", "llama", eos_token_id=2)
    growkit.run(replace(recipe_of(tmp_path, source, WIDER), verify=QUICK), proof_only=True)
    other = shutil.copytree(source, tmp_path / "other")
    loaded = growkit.load(tmp_path / "out", source=other)  # the control
    assert loaded.generation_config.eos_token_id == 2
    file = other / "generation_config.json"
    file.unlink() if settings is None else file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"generation_config\.json"):
        growkit.load(tmp_path / "out", source=other)


def test_a_manifest_that_was_changed_proves_nothing(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    growkit.run(recipe_of(tmp_path, source, WIDER))
    file = tmp_path / "out" / "growkit.json"
    content = json.loads(file.read_text())
    growkit.load(file)  # the control
    for change in ({"recipe": content["recipe"] | {"seed": 1}}, {"kept": True}, {"sha256": ""}):
        file.write_text(json.dumps(content | change))
        for opened in (growkit.load, GrownStorageReader):
            with pytest.raises(InputError, match="is not as growkit wrote it"):
                opened(file)
    assert not growkit.check(tmp_path / "out")["whole"]
    file.write_text(json.dumps(content | {"kept": False}))
    with pytest.raises(InputError, match="did not keep its promise"):
        growkit.load(file)


@pytest.mark.parametrize(
    ("rank", "size"), [({"LOCAL_RANK": "1"}, "2"), ({"RANK": "5"}, "2"), ({}, "0")], ids=str
)
def test_who_loads_alone_checks_every_file(
    rank: dict[str, str], size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have been started, but it is not known that they check anything."""
    source = save_model(tmp_path / "source", "llama", shard_size="8KB")
    growkit.run(recipe_of(tmp_path, source, WIDER))
    shared = "LOCAL_RANK" in rank
    for name, value in {**rank, ("LOCAL_" * shared) + "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    manifest = tmp_path / "out" / "growkit.json"
    Grown(manifest)  # the control
    together = 0
    for file in sorted(source.glob("*.safetensors")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(InputError, match=f"{file.name} is not the file"):
            Grown(manifest)
        try:
            Grown(manifest, together=True)
        except InputError:
            together += 1
        file.write_bytes(whole)
    assert together in ((1, 2) if shared else (3,))


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_the_proof_alone_is_kept(form: str, tmp_path: Path) -> None:
    """What is deleted is named with its hash, and what is loaded is that."""
    source = save_model(tmp_path / "source", "llama")
    quick = growkit.Settings(prompts=1, length=8)
    recipe = replace(recipe_of(tmp_path, source, WIDER), shard_size="20KB", format=form)
    with pytest.raises(InputError, match="is switched off; leave out --proof-only, or --no-verify"):
        growkit.run(recipe, proof_only=True)
    growkit.run(recipe)
    whole = json.loads((tmp_path / "out" / "growkit.json").read_text())["files"]
    shutil.move(tmp_path / "out", tmp_path / "whole")
    assert growkit.run(replace(recipe, verify=quick), proof_only=True)["kept"]
    out = tmp_path / "out"
    manifest = json.loads((out / "growkit.json").read_text())
    kept = {"README.md", "config.json", "generation_config.json"}
    assert {file.name for file in out.iterdir()} == kept | {"growkit.json"}
    assert manifest["not_kept"] == {n: whole[n] for n in whole.keys() - kept}
    assert growkit.check(out)["whole"]
    assert 'growkit.load("growkit.json", source="SRC")' in (out / "README.md").read_text()
    if form == "safetensors":
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
        assert not differing(growkit.load(out).state_dict(), expected)
    assert GrownStorageReader(out).grown.recipe.format == form
    with pytest.raises(InputError, match="a proof whose weights were not kept"):
        growkit.inspect(out)
    content = bytearray((source / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (source / "model.safetensors").write_bytes(content)
    for opened in (growkit.load, GrownStorageReader):
        with pytest.raises(InputError, match="its proof does not cover it"):
            opened(out)


def test_what_depends_on_the_machine_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama", num_hidden_layers=4, head_dim=8)
    step = growkit.ConvertStep("shared-diff", {"rank": 2})
    with pytest.raises(InputError, match="singular vectors"):
        growkit.load(recipe_of(tmp_path, source, step))


@pytest.mark.parametrize("fault", ["tied tensors differ", "NaN"])
def test_weights_that_are_not_written_are_not_loaded(fault: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", tie_word_embeddings=True)
    with edit_weights(source) as weights:
        if fault == "NaN":
            weights["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
        else:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    recipe = recipe_of(tmp_path, source, WIDER)
    for refused in (growkit.run, growkit.load):
        with pytest.raises(InputError, match=r"differs from the embedding|holds NaN"):
            refused(recipe)


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_slabs_cover_a_part_once(cuts: int) -> None:
    where = [slice(1, 5), slice(0, 7), slice(2, 9)]
    hits = torch.zeros(6, 8, 10)
    sizes = []
    for slab in slabs((6, 8, 10), cuts, 5, where):
        hits[tuple(slab)] += 1
        sizes.append(hits[tuple(slab)].numel())
    assert hits[tuple(where)].eq(1).all()
    assert hits.sum() == 4 * 7 * 7
    assert max(sizes) == {1: 49, 2: 7, 3: 5}[cuts]
    assert not list(slabs((4, 3), 2, where=[slice(2, 2)]))
    assert list(slabs((), 0)) == [[]]
