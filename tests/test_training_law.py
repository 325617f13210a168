"""The law of updates: grown models learn what their sources would have, and wrong factors show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import DataParallel
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import growkit
from growkit import training
from growkit.base.settings import Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.cli.app import app
from growkit.optimizer.groups import class_updates
from growkit.planning.updates import Update, law_of
from growkit.proof import training as proof
from growkit.training.groups import class_name
from tests.conftest import save_model, seeded
from tests.training_law import (
    CASES,
    GROUPED,
    MULTI_HEAD,
    UNSEEN,
    Case,
    Pair,
    spoiled,
    trained_with,
)

Make = Callable[..., Path]
QUICK: dict[str, Any] = {"prompts": 1, "length": 12}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Group-differentiated growth, of which some rows have other gradients than others."""
    return Pair.of(Case("diffllama", GROUPED, MULTI_HEAD), tmp_path_factory.mktemp("grouped"), 2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(3)
def test_training_continues_as_that_of_the_source(case: Case, tmp_path: Path) -> None:
    """Where the law reaches; else it says why not, and the proof knows."""
    pair = Pair.of(case, tmp_path, 2)
    why = law_of(pair.lineage).why
    assert case.why in "; ".join(why)
    if not case.why:
        assert why == ()
        assert max(pair.apart(6)) < 1e-11
    found = growkit.verify(pair.source, pair.target, **QUICK, steps=2)["training"]
    assert found is not None
    assert found["kept"] is (None if case.why else True)


def test_plain_settings_would_not_do(grouped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    assert max(grouped.apart(3)) < 1e-11
    plain = Update()
    monkeypatch.setattr(training.groups, "matched", lambda model, folder: _Always(plain))
    assert max(grouped.apart(3)) > 1e-4


class _Always(dict[str, Any]):
    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, name: str) -> Any:
        return self._value


def test_grouped_queries_are_copied_in_whole_groups(make: Make, tmp_path: Path) -> None:
    """Copies of a KV head that serve different heads train apart, and the law says so."""
    source = make("llama")  # four heads, two KV heads
    kept = growkit.grow(source, tmp_path / "keep", hidden="x2", symmetry="keep", verify=False)
    updates = kept["updates"]
    assert updates is not None
    assert updates["exact"]
    assert updates["why"] == []
    assert growkit.verify(source, tmp_path / "keep", **QUICK)["weights_recovered"]
    # A manifest from before does not say how copies stand.
    growkit.grow(
        source, tmp_path / "old", hidden="x2", symmetry="keep", groups="part", verify=False
    )
    manifest = tmp_path / "old" / "growkit.json"
    content = json.loads(manifest.read_text())
    assert content["recipe"]["steps"][0].pop("groups") == "part"
    manifest.write_text(json.dumps(content))
    assert growkit.verify(source, tmp_path / "old", **QUICK)["weights_recovered"]
    parting = growkit.grow(source, tmp_path / "break", hidden="x2", verify=False)["updates"]
    assert parting is not None
    assert "copies of kv_heads serve different heads" in parting["why"]


def test_every_wrong_factor_is_caught(grouped: Pair) -> None:
    """A sample, since each needs a training of its own."""
    updates, apart = trained_with(grouped)
    assert apart(updates) < 1e-13
    faults = dict(spoiled(updates))
    assert len(faults) > 8
    for name in seeded(1).sample(sorted(faults), 4):
        assert apart(faults[name]) > UNSEEN, name


def test_a_proof_with_training(grouped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(grouped.source), str(grouped.target), "--steps", "2", "--json"]
    arguments += ["--prompts", "1", "--length", "12"]
    found = CliRunner().invoke(app, ["verify", *arguments])
    assert found.exit_code == 0
    trained = json.loads(found.stdout)["training"]
    assert trained["kept"]
    assert trained["control_caught"]
    assert trained["relative"] < trained["tolerance"] < 1e-11
    assert len(trained["losses_target"]) == 3

    def wrong(checkpoint: Checkpoint, updates: Any) -> Any:
        return next(iter(dict(spoiled(class_updates(checkpoint, updates))).values()))

    monkeypatch.setattr(proof, "class_updates", wrong)
    found = CliRunner().invoke(app, ["verify", *arguments])
    assert found.exit_code == 1
    assert "does not learn what its source does" in json.loads(found.stdout)["reason"]


def test_random_splits_part_and_are_kept(make: Make, tmp_path: Path) -> None:
    source = make("llama", **MULTI_HEAD)
    settings = Settings(**QUICK, steps=1)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=settings)
    assert result["kept"]
    assert result["verification"] is not None
    trained = result["verification"]["training"]
    assert trained is not None
    assert trained["kept"] is None
    assert trained["tolerance"] is None
    said = "both were also trained for 1 step: the target is trained differently ("
    assert trained["reason"].startswith(said)
    assert " tensors (first model." in trained["reason"]
    assert "it is split at random)" in trained["reason"]
    assert "while --symmetry keep preserves the source's training" in trained["reason"]
    assert trained["relative"] > 1e-6


def test_new_layers_stand_still(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", method="depth", layers="x2", verify=False)
    trained = growkit.verify(source, tmp_path / "out", **QUICK, steps=1)["training"]
    assert trained is not None
    assert trained["kept"]
    assert trained["standing_still"] == 18


def test_groups_of_a_grown_model(make: Make, tmp_path: Path) -> None:
    """The table of the documents, by the model's own names."""
    source = make("llama", tie_word_embeddings=True, **MULTI_HEAD)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    groups = training.param_groups(model, tmp_path / "out", lr=0.1, weight_decay=0.1, eps=1e-6)
    torch.optim.AdamW(groups)
    by_id = {id(each): group for group in groups for each in group["params"]}
    found = {
        name: tuple(by_id[id(each)][key] for key in ("lr", "weight_decay", "eps"))
        for name, each in model.named_parameters()
    }
    assert found["model.embed_tokens.weight"] == (0.1, 0.1, 5e-7)
    assert found["model.layers.1.mlp.up_proj.weight"] == (0.05, 0.2, 5e-7)
    assert found["model.layers.0.input_layernorm.weight"] == (0.1, 0.0, 5e-7)
    assert found["model.norm.weight"] == (0.05, 0.0, 1e-6)
    assert len(by_id) == len(found)
    with pytest.raises(growkit.InputError, match=r"has shape \[29, 16\], but \[29, 32\]"):
        training.param_groups(
            AutoModelForCausalLM.from_pretrained(source), tmp_path / "out", lr=0.1
        )
    with pytest.raises(growkit.InputError, match="no parameter of the Linear"):
        training.param_groups(torch.nn.Linear(2, 2), tmp_path / "out", lr=0.1)
    with pytest.raises(growkit.InputError, match="'moun' is not known"):
        training.param_groups(model, tmp_path / "out", lr=0.1, optimizer="moun")
    manifest = tmp_path / "out" / "growkit.json"
    content = json.loads(manifest.read_text())
    groups = content["updates"]["groups"]
    for updates, message in (
        ({"groups": [groups[0] | {"lr": -1}, *groups[1:]]}, "no updates as growkit writes them"),
        (None, "no updates as growkit writes them"),
    ):
        changed = content | {"updates": updates}
        manifest.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))
        with pytest.raises(growkit.InputError, match=message):
            training.param_groups(model, tmp_path / "out", lr=0.1)
    manifest.unlink()
    with pytest.raises(growkit.InputError, match=r"has no growkit\.json"):
        training.param_groups(model, tmp_path / "out", lr=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "module.model.norm.weight",
        "_orig_mod.model.norm.weight",
        "model._fsdp_wrapped_module.norm._checkpoint_wrapped_module.weight",
        "base_model.model.model.norm.base_layer.weight",
        "base_model.model.model.norm.modules_to_save.default.weight",
    ],
)
def test_engines_put_words_into_names(name: str) -> None:
    assert class_name(name) == "model.norm.weight"
    assert (
        class_name("base_model.model.model.q_proj.lora_A.default.weight") != "model.q_proj.weight"
    )


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, DataParallel])
def test_wrapped_models_have_the_same_groups(
    wrap: Callable[[Any], Any], make: Make, tmp_path: Path
) -> None:
    """Whether the wrapper leaves itself out of the names of parameters or not."""
    out = tmp_path / "out"
    growkit.grow(make("diffllama"), out, method="depth", layers="x2", verify=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = training.param_groups(model, out, lr=0.1, weight_decay=0.1)
    found = training.param_groups(wrap(model), out, lr=0.1, weight_decay=0.1)
    assert [[*map(id, group.pop("params"))] for group in found] == [
        [*map(id, group.pop("params"))] for group in expected
    ]
    assert found == expected
    assert [group["weight_decay"] > 0 for group in found] == [True, False]


def test_training_that_cannot_be_proved(grouped: Pair, tmp_path: Path) -> None:
    for steps in (0, 10**6):
        with pytest.raises(
            growkit.InputError, match=r"steps .* cannot be used; choose 1 to 10,000"
        ):
            Settings(steps=steps)
    source = save_model(tmp_path / "one", "llama")
    other = save_model(tmp_path / "other", "llama")
    with pytest.raises(growkit.InputError, match="no manifest records how the target was made"):
        growkit.verify(source, other, **QUICK, steps=1)
    tensors = Checkpoint(grouped.target).tensors
    huge = {name: type(info)((2**25, 2**20), info.dtype) for name, info in tensors.items()}
    with pytest.raises(growkit.InputError, match=r"would take .* of memory"):
        proof.check_room(Settings(steps=1), huge, torch.device("cpu"))
