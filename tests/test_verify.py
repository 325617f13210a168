"""The proof says "preserved" when it is, and where it is not when it is not."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file

import growkit
from growkit.base import limits
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.metrics import Distance
from growkit.proof import control
from growkit.results.proof import VerifyResult
from tests.conftest import edit_json, edit_weights, folder_bytes, save_model

QUICK = {"prompts": 2, "length": 12}
Make = Callable[..., Path]


@pytest.fixture(scope="module", params=["llama", "diffllama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a five-layer source and its grown target."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder / "source", request.param, num_hidden_layers=5)
    growkit.grow(folder / "source", folder / "target", hidden="x2", verify=None)
    return folder


@pytest.fixture
def broken(pair: Path, tmp_path: Path) -> Path:
    """A copy of the target, to be spoiled."""
    return shutil.copytree(pair / "target", tmp_path / "target")


def test_a_sound_pair_is_preserved(pair: Path) -> None:
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert result["kept"]
    assert result["negative_control_caught"]
    assert result["first_differing_layer"] is None
    assert result["first_difference"] is None
    assert result["promise"] == "exact"
    assert result["weights_recovered"] is True
    assert result["tokens"] == 24
    assert result["strict_float64"]["relative"] < 1e-12
    assert result["strict_float64"]["kl_nats_per_token"] < 1e-15
    assert result["strict_float64"]["top1_agreement"] == 1.0
    assert abs(result["loss_source"] - result["loss_target"]) < 1e-9
    assert result["native"]["dtype"] == "float32"
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
    assert result["weights_recovered"] is None
    assert "weights were not compared" in result["reason"]
    with edit_weights(tmp_path / "target") as tensors:
        tensors["model.layers.3.self_attn.k_proj.weight"] *= 1.01
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["first_differing_layer"] == 3
    assert result["fault"] is not None
    assert result["fault"]["component"] is None  # which only a manifest tells


def test_a_row_that_no_prompt_touches(pair: Path, broken: Path) -> None:
    """No logit shows it; the weights do, down to the last bit of one element."""
    with edit_weights(broken) as tensors:
        tensors["model.embed_tokens.weight"][28, 5] *= 1 + 2**-23
    one = {"prompts": 1, "length": 2, "seed": 3}
    result = growkit.verify(pair / "source", broken, **one)
    assert result["strict_float64"]["max_abs_logit_diff"] < 1e-12
    assert not result["kept"]
    assert result["first_lost_tensor"] == "model.embed_tokens.weight"
    (broken / "growkit.json").unlink()
    assert growkit.verify(pair / "source", broken, **one)["kept"]


@pytest.mark.parametrize("content", ["{", "{}", '{"recipe": {"steps": 1}}'])
def test_a_damaged_manifest_is_not_passed_over(pair: Path, broken: Path, content: str) -> None:
    (broken / "growkit.json").write_text(content)
    with pytest.raises(InputError, match=r"growkit\.json"):
        growkit.verify(pair / "source", broken, **QUICK)


def test_another_source_is_not_the_manifests(pair: Path, make: Make) -> None:
    other = make("llama", num_hidden_layers=4, vocab_size=29)
    result = growkit.verify(other, pair / "target", **QUICK)
    assert not result["kept"]
    assert result["weights_recovered"] in (None, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pickled_sources_can_be_proved(dtype: torch.dtype, make: Make, tmp_path: Path) -> None:
    """Strict float64 must not read the bytes of a pickle as float64."""
    source = make("llama", dtype=dtype)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"]


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
    assert result["verification"] is not None
    assert "layers.1." not in result["verification"]["negative_control"]


def test_a_source_that_overflows_has_nothing_to_keep_there(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float16)
    with edit_weights(source) as tensors:
        for name in ("up", "gate"):
            tensors[f"model.layers.0.mlp.{name}_proj.weight"] *= 2000
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    verification = result["verification"]
    assert verification is not None
    assert result["kept"]
    assert verification["native"]["tolerance"] is None
    assert "float16 the source itself" in verification["reason"]
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("order", [(0.0, math.nan), (math.nan, 0.0)])
def test_distance_keeps_a_nan_in_any_order(order: tuple[float, float]) -> None:
    distance = Distance()
    for value in order:
        source = torch.zeros(3, 4)
        distance.add(source, source + value, torch.zeros(3, dtype=torch.long))
    assert not distance.relative < 1e-12
    assert distance.measured("float64", "cpu", None)["max_abs_logit_diff"] is None


def test_distance_is_what_it_says() -> None:
    """Against the definitions, with distributions whose KL is known."""
    source = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
    target = torch.tensor([[0.25, 0.75], [0.4, 0.6]]).double().log()
    distance = Distance()
    distance.add(source, target, torch.tensor([1, -1]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    kl += 0.25 * math.log(0.25 / 0.4) + 0.75 * math.log(0.75 / 0.6)
    assert distance.kl == pytest.approx(kl)
    assert distance.agreeing == 1
    assert distance.loss_source == pytest.approx(-math.log(0.5))
    assert distance.loss_target == pytest.approx(-math.log(0.75))


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
    assert result["negative_control_caught"]
    assert result["kept"]  # the gradients and everything after the control are of sound weights
    stages = Layerwise(Checkpoint(tmp_path / "out"), torch.float64, torch.device("cpu"), None)
    for stage in stages.stages([Call(torch.arange(4))]):
        for key, parameter in stage.module.named_parameters() if stage.layer is not None else ():
            clean = parameter.detach().clone()
            with stage.scaled(key, 1 + control.FAULT):
                assert not parameter.equal(clean)  # the control
            assert parameter.equal(clean)


@pytest.mark.parametrize(
    ("module", "limit", "sentence"),
    [
        (control, "FAULT", "no verdict: "),
        (limits, "NATIVE_MARGIN", "not preserved: in float32"),
    ],
)
def test_no_room_for_a_fault_or_for_rounding(
    module: Any, limit: str, sentence: str, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control that is not noticed, and more than rounding in the storage dtype alone."""
    monkeypatch.setattr(module, limit, 0.0)
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert result["strict_float64"]["relative"] < 1e-12
    assert result["negative_control_caught"] is (module is limits)
    assert not result["kept"]
    assert result["reason"].startswith(sentence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_storage_dtype_is_compared_as_well(
    dtype: torch.dtype, make: Make, tmp_path: Path
) -> None:
    source = make("diffllama", dtype=dtype)
    result = growkit.grow(source, tmp_path / "target", hidden="x3", verify=Settings(**QUICK))
    verification = result["verification"]
    assert verification is not None
    assert verification["kept"]
    assert verification["native"]["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("size", [0, -1, 3.5, True, None, "29"])
def test_a_vocabulary_is_a_number_of_tokens(size: object, make: Make) -> None:
    source, target = make("llama"), make("llama")
    with edit_json(target / "config.json") as config:
        config["vocab_size"] = size
    with pytest.raises(InputError, match="a whole number above 0 was expected"):
        growkit.verify(source, target, **QUICK)


def test_different_vocabularies_cannot_be_compared(make: Make) -> None:
    with pytest.raises(InputError, match=r"vocab_size is 29 .* and 30"):
        growkit.verify(make("llama"), make("llama", vocab_size=30), **QUICK)


def test_a_broken_promise_leaves_a_rejected_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STRICT_MARGIN", 0.0)
    result = growkit.grow(make("llama"), tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"] is False
    assert result["output"] == str(tmp_path / "target.rejected")
    assert not (tmp_path / "target").exists()
    manifest = json.loads((tmp_path / "target.rejected" / "growkit.json").read_text())
    assert manifest["verification"]["kept"] is False
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama-0", "target.rejected"]


@pytest.mark.gpu
def test_on_the_gpu_if_there_is_one(pair: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no GPU"):
            growkit.verify(pair / "source", pair / "target", device="cuda", **QUICK)
        return
    result = growkit.verify(pair / "source", pair / "target", device="cuda", **QUICK)
    assert result["kept"]
    assert result["native"]["device"] == torch.cuda.get_device_name()
