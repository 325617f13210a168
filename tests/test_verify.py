"""The proof says "preserved" when it is, and where it is not when it is not."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import transformers
from safetensors.torch import load_file

import growkit
from growkit.base import limits
from growkit.base.settings import FEW, LONG, MANY, SHORT, Settings
from growkit.cli.demo import MODEL
from growkit.proof import control
from growkit.results.proof_result import VerifyResult
from tests.commands import refusal
from tests.files import edit_json, edit_weights, folder_bytes
from tests.models import Make, save_model

QUICK = {"prompts": 2, "length": 12}


@pytest.fixture(scope="module", params=["llama", "diffllama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a five-layer source and its grown target."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder / "source", request.param, num_hidden_layers=5)
    growkit.grow(folder / "source", folder / "target", hidden="x2", verify=None)
    return folder


def test_a_sound_pair_is_preserved(pair: Path) -> None:
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert result["kept"]
    assert result.sections.logits.negative_control_caught
    assert result.sections.logits.first_differing_layer is None
    assert result.sections.logits.first_difference is None
    assert result["promise"] == "exact"
    assert result.sections.weights.recovered is True
    assert result.sections.logits.tokens == 24
    assert result.sections.logits.strict_float64.relative < 1e-12
    assert result.sections.logits.strict_float64.kl_nats_per_token < 1e-15
    assert result.sections.logits.strict_float64.top1_agreement == 1.0
    assert abs(result.sections.logits.loss_source - result.sections.logits.loss_target) < 1e-9
    assert result.sections.logits.native.dtype == "float32"
    assert result.keys() == get_type_hints(VerifyResult).keys()
    json.dumps(result, allow_nan=False)


def test_copies_in_another_order_are_compared_as_well(make: Make, tmp_path: Path) -> None:
    """A folder that repeats hidden coordinates side by side is the same function, and no fault."""
    source = make("llama", num_hidden_layers=5)
    growkit.grow(source, tmp_path / "target", hidden="x2", symmetry="keep", verify=None)

    order = torch.arange(32).view(2, 16).T.flatten()
    with edit_weights(tmp_path / "target") as tensors:
        for name in tensors:
            for dimension, size in enumerate(tensors[name].shape):
                heads = ("q_proj", 0), ("o_proj", 1)
                if size == 32 and not any(n in name and dimension == d for n, d in heads):
                    tensors[name] = tensors[name].index_select(dimension, order)
    (tmp_path / "target" / "growkit.json").unlink()
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["kept"]
    assert result.sections.weights.recovered is None
    assert "weights were not compared" in result["reason"]
    with edit_weights(tmp_path / "target") as tensors:
        tensors["model.layers.3.self_attn.k_proj.weight"] *= 1.01
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result.sections.logits.first_differing_layer == 3
    assert result["fault"]["component"] is None  # which only a manifest tells


@pytest.mark.parametrize("middle", ["identity", "zero"])
def test_the_control_finds_a_place_where_a_fault_shows(
    middle: str, make: Make, tmp_path: Path
) -> None:
    """An identity block in the middle hides every fault inside it, and is no reason to refuse."""
    source = make("llama", num_hidden_layers=3)
    with edit_weights(source) as tensors:
        for name, tensor in tensors.items():
            written = "o_proj" in name or "down_proj" in name
            if "layers.1." in name and (written or middle == "zero"):
                tensor.zero_()
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"]
    assert "layers.1." not in result["verification"].sections.logits.negative_control


def test_a_source_that_overflows_has_nothing_to_keep_there(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float16)
    with edit_weights(source) as tensors:
        for name in ("up", "gate"):
            tensors[f"model.layers.0.mlp.{name}_proj.weight"] *= 2000
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    verification = result["verification"]
    assert result["kept"]
    assert verification.sections.logits.native.tolerance is None
    assert "float16 the source itself" in verification["reason"]
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_fault_goes_and_reaches_no_file(file: str, make: Make, tmp_path: Path) -> None:
    """Weights in float64 are not cast: what is spoiled is mapped from the files."""
    source = make("llama", dtype=torch.float64, num_hidden_layers=4)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    for folder in (source, tmp_path / "out"):
        weights = load_file(folder / "model.safetensors")
        if file.endswith(".bin"):
            (folder / "model.safetensors").unlink()
            torch.save(weights, folder / file)
    before = folder_bytes(tmp_path)
    result = growkit.verify(source, tmp_path / "out", **QUICK)
    assert folder_bytes(tmp_path) == before
    assert result.sections.logits.negative_control_caught
    assert result["kept"]  # the gradients and everything after the control are of sound weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("module", "limit", "sentence"),
    [(control, "FAULT", "no verdict: "), (limits, "NATIVE_MARGIN", "not preserved: in float32")],
)
def test_no_room_for_a_fault_or_for_rounding(
    module: Any, limit: str, sentence: str, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control that is not noticed, and more than rounding in the storage dtype alone."""
    monkeypatch.setattr(module, limit, 0.0)
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert result.sections.logits.strict_float64.relative < 1e-12
    assert result.sections.logits.negative_control_caught is (module is limits)
    assert not result["kept"]
    assert result["reason"].startswith(sentence)


BRIEF = growkit.Settings(prompts=2, length=24)


def verified(source: Path, out: Path) -> VerifyResult:
    return growkit.verify(source, out, settings=BRIEF)


def test_infinities_of_padding_are_not_held_against_the_target(tmp_path: Path) -> None:
    """In float64 some classes make infinities of padding, which hide no fault."""
    source, out = save_model(tmp_path / "source", "bloom", dtype=torch.float64), tmp_path / "out"
    growkit.grow(source, out, hidden="x2", verify=False)
    found = verified(source, out)
    assert found["kept"]
    padded, plain = (
        next(each for each in found.sections.modes.modes if each["name"] == name)
        for name in ("left padding", "prefill")
    )
    assert (padded["native"], padded["native_tolerance"]) == (None, None)
    assert "NaN or infinite logits" in padded["note"]
    assert plain["native_tolerance"] is not None
    with edit_weights(out) as tensors:
        tensors["transformer.h.1.mlp.dense_4h_to_h.weight"][0] *= 1.5
    assert not verified(source, out)["kept"]


@pytest.mark.usage
def test_a_class_that_cannot_run_in_float64_when_it_is_loaded_whole(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt2", reorder_and_upcast_attn=True)
    made = growkit.grow(source, tmp_path / "out", hidden="x2", verify=BRIEF)
    assert made["kept"]
    ways = {each["name"]: each for each in made["verification"].sections.modes.modes}
    for name in ("save and reload", "generate"):
        assert ways[name]["kept"] is None
        assert ways[name]["note"].startswith("transformers cannot ")


def test_training_with_new_tokens_is_looked_at_on_the_old_ones(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    settings = growkit.Settings(prompts=1, length=24, steps=2)
    made = growkit.grow(source, tmp_path / "out", vocab="x2", new_tokens="mean", verify=settings)
    assert made["kept"]
    training = made["verification"].sections.training
    assert training.findings[0].kept is None
    assert training["why"]
    assert math.isfinite(training["relative"])


LONGEST = 80


def grown(folder: Path, **verify: Any) -> tuple[Path, Path, Any]:
    source = save_model(folder / "source", "llama", max_position_embeddings=LONGEST)
    settings = growkit.Settings(**verify)
    out = folder / "out"
    return source, out, growkit.grow(source, out, hidden="x2", verify=settings)


def tokens(result: Any) -> int:
    assert result["kept"]
    return int(result.sections.logits.tokens)


def test_few_tokens_do_where_no_weight_can_be_lost(tmp_path: Path) -> None:
    source, target, result = grown(tmp_path)
    assert tokens(result["verification"]) == FEW * SHORT
    assert tokens(growkit.verify(source, target, prompts=1)) == SHORT
    assert tokens(growkit.verify(source, target, length=12)) == FEW * 12
    assert tokens(growkit.verify(source, target, prompts=1, length=LONG)) == LONGEST


@pytest.mark.usage
def test_many_tokens_are_taken_where_a_weight_is_lost_or_no_manifest_says(tmp_path: Path) -> None:
    source, target, _ = grown(tmp_path, prompts=1, length=12)
    file = target / "growkit.json"
    with edit_json(file) as manifest:
        manifest["recipe"]["steps"][0]["hidden"] = "x4"
    result = growkit.verify(source, target)
    assert (result["kept"], result.sections.logits.tokens) == (False, MANY * LONGEST)
    assert result.sections.trainability is None  # tensors are not those of the manifest
    file.unlink()
    assert tokens(growkit.verify(source, target)) == MANY * LONGEST


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("more", "tokens"), [({}, 8 * 128), ({"length": 16}, 8 * 16)])
def test_the_loss_of_a_text_rests_on_more_tokens_than_the_function(
    more: dict[str, int], tokens: int, tmp_path: Path
) -> None:
    """Every weight is recovered, so that 4 random prompts of 48 would do; the text is short."""
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 48)
    settings = growkit.Settings(text=str(tmp_path / "text"), **more)
    result = growkit.grow(MODEL, tmp_path / "out", ffn="x2", verify=settings)
    logits = result["verification"]["sections"]["logits"]
    assert (logits["tokens"], logits["predictions"]) == (tokens, tokens - 8)


def test_encoders_with_decoders_are_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=29, d_model=16, d_ff=24, num_layers=2, num_heads=4, d_kv=4
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    copy = shutil.copytree(tmp_path / "source", tmp_path / "copy")
    assert "type t5" in refusal("verify", tmp_path / "source", copy)
