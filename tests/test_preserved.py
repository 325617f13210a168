"""The fingerprint in the manifest, and models in memory that are held against it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

import growkit
from growkit.training import AssertPreserved, assert_preserved, keep_stored
from tests.files import edit_json, edit_weights, listed
from tests.models import Make, load_strict, save_model

QUICK = growkit.Settings(prompts=2, length=12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("pair")
    source = save_model(place / "source", "llama", num_hidden_layers=1, attention_dropout=0.5)
    growkit.grow(source, place / "out", hidden="x2", verify=QUICK)
    return source, place / "out"


@pytest.fixture
def folder(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(pair[1], tmp_path / "out")


def held_by(folder: Path) -> Any:
    manifest = json.loads((folder / "growkit.json").read_text())
    return manifest["verification"]["sections"]["logits"]["fingerprint"]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def test_it_holds_logits_of_the_source(pair: tuple[Path, Path]) -> None:
    held = held_by(pair[1])
    with torch.no_grad():
        logits = load_strict(pair[0])(torch.tensor([held["ids"]])).logits[0]
    expected = logits.gather(-1, torch.tensor(held["places"]))
    assert held["of"] == "source"
    assert torch.allclose(torch.tensor(held["logits"], dtype=torch.float64), expected, atol=1e-7)
    assert len({*held["ids"]}) == 29  # every row of an embedding
    assert {place for row in held["places"] for place in row} == {*range(29)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_models_of_every_dtype_are_known(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    model = loaded(pair[1], dtype)
    limits = held_by(pair[1])["limits"]
    most = limits.get(str(dtype).removeprefix("torch."), limits["float32"])
    assert assert_preserved(model, pair[1]) < most
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:8] = 0
    with pytest.raises(growkit.InputError, match="in memory does not compute what"):
        assert_preserved(model, pair[1])


def test_what_is_computed_more_narrowly_is_held_to_less(pair: tuple[Path, Path]) -> None:
    """float32 weights under bfloat16 arithmetic, as mixed precision has them."""
    model = loaded(pair[1])
    exact = assert_preserved(model, pair[1])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = assert_preserved(model, pair[1])
    assert exact < 1e-6
    assert 1e-3 < rounded < held_by(pair[1])["limits"]["bfloat16"]
    widening = model.lm_head.register_forward_hook(lambda *given: given[-1].float())
    with torch.autocast("cpu", torch.bfloat16):
        assert assert_preserved(model, pair[1]) == rounded  # as accelerate returns logits
    widening.remove()
    with torch.no_grad():  # the control: as much as bfloat16 does is too much without it
        model.lm_head.weight *= 1 + rounded
    with pytest.raises(growkit.InputError, match="rounding in float32"):
        assert_preserved(model, pair[1])


def test_a_head_may_be_wider_than_its_layers(pair: tuple[Path, Path]) -> None:
    """Logits that fill float32, of layers in bfloat16: the matrices show the arithmetic."""
    model = loaded(pair[1], torch.bfloat16)
    model.lm_head.float().register_forward_pre_hook(lambda module, given: (given[0].float(),))
    assert 1e-4 < assert_preserved(model, pair[1]) < held_by(pair[1])["limits"]["bfloat16"]


def test_a_model_is_left_as_it_was(pair: tuple[Path, Path]) -> None:
    model = loaded(pair[1]).train()
    model.model.layers[0].mlp.eval()
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()

    def state() -> list[Any]:
        modes = [module.training for module in model.modules()]
        hooks = [len(module._forward_hooks) for module in model.modules()]
        gradients = [parameter.grad.sum().item() for parameter in model.parameters()]
        return [modes, hooks, gradients, torch.get_rng_state().tolist(), torch.is_grad_enabled()]

    before = state()
    assert assert_preserved(model, pair[1]) < 1e-6  # so without the dropout
    assert state() == before


def test_without_a_proof_files_are_asked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    growkit.grow(pair[0], out, hidden="x2", verify=False)
    assert assert_preserved(loaded(out), out) < 1e-6
    with pytest.raises(growkit.InputError, match="the model that was written"):
        assert_preserved(spoiled(loaded(out)), out)
    with edit_weights(out) as weights:
        weights["model.norm.weight"] *= 1.01
    with pytest.raises(growkit.InputError, match="is not what growkit wrote"):
        assert_preserved(loaded(out), out)


def spoiled(model: Any) -> Any:
    with torch.no_grad():
        model.model.norm.weight[3] *= 1.01
    return model


def test_another_function_is_known_by_itself(make: Make, tmp_path: Path) -> None:
    source = make("diffllama", head_dim=8, num_hidden_layers=1)
    out = tmp_path / "out"
    growkit.convert(source, out, "shared-diff", rank=1, verify=QUICK)
    assert held_by(out)["of"] == "target"
    assert assert_preserved(loaded(out), out) < 1e-6
    with pytest.raises(growkit.InputError, match="the model that was written"):
        assert_preserved(spoiled(loaded(out)), out)


def test_head_norms_in_float64_can_be_kept(make: Make, tmp_path: Path) -> None:
    source = make("diffllama", head_dim=8, num_hidden_layers=1)
    out = tmp_path / "out"
    growkit.convert(source, out, "dint", gamma="gated", verify=False)
    model = loaded(out)
    name = "model.layers.0.self_attn.head_norm.weight"
    stored = load_file(out / "model.safetensors")[name]
    assert model.get_parameter(name).dtype == torch.float32
    assert not torch.equal(model.get_parameter(name).double(), stored)  # else nothing is shown
    assert keep_stored(model, out) == [name]
    assert torch.equal(model.get_parameter(name), stored)
    assert keep_stored(model, out) == []
    assert assert_preserved(model, out) < 1e-6
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    assert model.get_parameter(name).grad.dtype == torch.float64
    with pytest.raises(growkit.InputError, match="has shape"):
        keep_stored(loaded(make("llama", hidden_size=8)), out)


def test_a_run_that_was_taken_up_is_not_asked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    callback, arguments = AssertPreserved(pair[1]), TrainingArguments(str(tmp_path), use_cpu=True)
    state, control = TrainerState(global_step=3), TrainerControl()
    model = spoiled(loaded(pair[1]))
    callback.on_train_begin(arguments, state, control, model=model)
    state.global_step = 0
    with pytest.raises(growkit.InputError, match="does not compute"):
        callback.on_train_begin(arguments, state, control, model=model)


@pytest.mark.parametrize("odd", listed("preserved", "odd fingerprints are refused"))
def test_odd_fingerprints_are_refused(odd: Any, folder: Path) -> None:
    with edit_json(folder / "growkit.json") as manifest:
        proof = manifest["verification"]
        logits = proof["sections"]["logits"]
        logits["fingerprint"] = {**logits["fingerprint"], **odd} if isinstance(odd, dict) else odd
    with pytest.raises(growkit.InputError, match="is damaged"):
        assert_preserved(loaded(folder), folder)


def test_the_wrong_folder_is_refused(pair: tuple[Path, Path], make: Make) -> None:
    with pytest.raises(growkit.InputError, match=r"has no growkit\.json"):
        assert_preserved(loaded(pair[0]), pair[0])
    with pytest.raises(growkit.InputError, match="does not compute"):
        assert_preserved(loaded(make("llama", seed=1)), pair[1])
    with pytest.raises(growkit.InputError, match="has fewer tokens"):
        assert_preserved(loaded(make("llama", vocab_size=11)), pair[1])
