"""The proof says "preserved" when it is, and where it is not when it is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.metrics import Distance
from growkit.proof import comparison, parts
from growkit.results.proof import VerifyResult
from tests.conftest import folder_bytes, save_model

QUICK = {"prompts": 2, "length": 12}
Make = Callable[..., Path]


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights of a folder in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"}
    )


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
    copy = tmp_path / "target"
    copy.mkdir()
    for file in (pair / "target").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "tensor",
    [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ],
)
def test_one_percent_in_layer_three(pair: Path, broken: Path, tensor: str) -> None:
    spoil(broken, lambda tensors: tensors[f"model.layers.3.{tensor}"].mul_(1.01))
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert not result["kept"]
    assert result["first_differing_layer"] == 3
    assert result["first_difference"] == "model.layers.3"
    assert result["first_lost_tensor"] == f"model.layers.3.{tensor}"
    assert f"model.layers.3.{tensor}" in result["reason"]


def test_faults_outside_the_layers_are_named(pair: Path, broken: Path) -> None:
    spoil(broken, lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert (result["kept"], result["first_differing_layer"]) == (False, None)
    assert result["first_difference"] == "lm_head"
    spoil(broken, lambda tensors: tensors["model.embed_tokens.weight"].mul_(1.01))
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert result["first_difference"] == "model.embed_tokens"


def test_copies_in_another_order_are_compared_as_well(make: Make, tmp_path: Path) -> None:
    """A folder that repeats hidden coordinates side by side is the same function, and no fault."""
    source = make("llama", num_hidden_layers=5)
    growkit.grow(source, tmp_path / "target", hidden="x2", symmetry="keep", verify=None)

    def interleave(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            for dimension, size in enumerate(tensor.shape):
                heads = ("q_proj" in name and dimension == 0) or (
                    "o_proj" in name and dimension == 1
                )
                if size == 32 and not heads:
                    order = torch.arange(32).view(2, 16).T.flatten()
                    tensor = tensor.index_select(dimension, order)
                tensors[name] = tensor

    spoil(tmp_path / "target", interleave)
    (tmp_path / "target" / "growkit.json").unlink()
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["kept"]
    assert result["weights_recovered"] is None
    assert "weights were not compared" in result["reason"]
    spoil(tmp_path / "target", lambda t: t["model.layers.3.self_attn.k_proj.weight"].mul_(1.01))
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["first_differing_layer"] == 3
    assert result["fault"] is not None
    assert result["fault"]["component"] == "k_proj"
    assert result["fault"]["factor"] == pytest.approx(1.01)


def test_the_smallest_change_of_one_weight_is_seen(pair: Path, broken: Path) -> None:
    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["model.layers.2.mlp.up_proj.weight"]
        weight[3, 3] = torch.nextafter(weight[3, 3], torch.tensor(math.inf))

    spoil(broken, nudge)
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert not result["kept"]
    assert result["first_differing_layer"] == 2


def test_a_row_that_no_prompt_touches(pair: Path, broken: Path) -> None:
    """No logit shows it; the weights do, down to the last bit of one element."""
    spoil(broken, lambda tensors: tensors["model.embed_tokens.weight"][28, 5].mul_(1 + 2**-23))
    one = {"prompts": 1, "length": 2, "seed": 3}
    result = growkit.verify(pair / "source", broken, **one)
    assert result["strict_float64"]["max_abs_logit_diff"] < 1e-12
    assert not result["kept"]
    assert result["first_lost_tensor"] == "model.embed_tokens.weight"
    (broken / "growkit.json").unlink()
    assert growkit.verify(pair / "source", broken, **one)["kept"]


def test_copies_that_disagree_are_lost(pair: Path, broken: Path) -> None:
    """Rows whose parts still sum to something, but not to the same in every copy."""
    spoil(broken, lambda tensors: tensors["model.layers.0.mlp.gate_proj.weight"][1].mul_(2))
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert result["first_lost_tensor"] == "model.layers.0.mlp.gate_proj.weight"


def test_a_tensor_too_many(pair: Path, broken: Path) -> None:
    spoil(broken, lambda tensors: tensors.update({"extra.weight": torch.ones(2)}))
    result = growkit.verify(pair / "source", broken, **QUICK)
    assert (result["kept"], result["first_lost_tensor"]) == (False, "extra.weight")


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
@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_sources_can_be_proved(
    legacy: bool, dtype: torch.dtype, make: Make, tmp_path: Path
) -> None:
    """Strict float64 must not read the bytes of a pickle as float64."""
    source = make("llama", dtype=dtype)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"]


@pytest.mark.parametrize("middle", ["identity", "zero"])
def test_the_control_finds_a_place_where_a_fault_shows(
    middle: str, make: Make, tmp_path: Path
) -> None:
    """An identity block in the middle hides every fault inside it, and is no reason to refuse."""
    source = make("llama", num_hidden_layers=3)

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            written = "o_proj" in name or "down_proj" in name
            if "layers.1." in name and (written or middle == "zero"):
                tensor.zero_()

    spoil(source, silence)
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"]
    assert result["verification"] is not None
    assert "layers.1." not in result["verification"]["negative_control"]


def test_a_source_that_overflows_has_nothing_to_keep_there(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float16)
    spoil(source, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(2000))
    spoil(source, lambda tensors: tensors["model.layers.0.mlp.gate_proj.weight"].mul_(2000))
    result = growkit.grow(source, tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    verification = result["verification"]
    assert verification is not None
    assert result["kept"]
    assert verification["native"]["tolerance"] is None
    assert "float16 the source itself" in verification["reason"]
    json.dumps(result, allow_nan=False)


def test_a_nan_never_passes(pair: Path, broken: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][0, 0] = math.nan

    spoil(broken, poison)
    with pytest.raises(InputError, match=r"lm_head\.weight .* NaN"):
        growkit.verify(pair / "source", broken, **QUICK)


@pytest.mark.parametrize("order", [(0.0, math.nan), (math.nan, 0.0)])
def test_distance_keeps_a_nan_in_any_order(order: tuple[float, float]) -> None:
    distance = Distance()
    for value in order:
        source = torch.zeros(3, 4)
        distance.add(source, source + value, torch.zeros(3, dtype=torch.long))
    assert not distance.relative < 1e-12
    assert distance.measured("float64", "cpu", 1e-12, "")["max_abs_logit_diff"] is None


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
            with stage.scaled(key, 1 + comparison.FAULT):
                assert not parameter.equal(clean)  # the control
            assert parameter.equal(clean)


def test_a_control_that_is_not_noticed_spoils_the_verdict(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "FAULT", 0.0)
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert not result["negative_control_caught"]
    assert not result["kept"]


def test_more_than_rounding_in_the_storage_dtype_is_not_preserved(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROUNDING_MARGIN", 0.0)
    result = growkit.verify(pair / "source", pair / "target", **QUICK)
    assert result["strict_float64"]["relative"] < 1e-12
    assert not result["kept"]
    assert "not preserved: in float32" in result["reason"]


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
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(InputError, match="a whole number above 0 was expected"):
        growkit.verify(source, target, **QUICK)


def test_different_vocabularies_cannot_be_compared(make: Make) -> None:
    with pytest.raises(InputError, match=r"vocab_size is 29 .* and 30"):
        growkit.verify(make("llama"), make("llama", vocab_size=30), **QUICK)


def test_a_missing_tensor_is_not_filled_in_at_random(pair: Path, broken: Path) -> None:
    spoil(broken, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        growkit.verify(pair / "source", broken, **QUICK)


def test_a_broken_promise_leaves_a_rejected_folder(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STRICT_MARGIN", 0.0)
    result = growkit.grow(make("llama"), tmp_path / "target", hidden="x2", verify=Settings(**QUICK))
    assert result["kept"] is False
    assert result["output"] == str(tmp_path / "target.rejected")
    assert not (tmp_path / "target").exists()
    manifest = json.loads((tmp_path / "target.rejected" / "growkit.json").read_text())
    assert manifest["verification"]["kept"] is False
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama-0", "target.rejected"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(pair: Path) -> None:
    result = growkit.verify(pair / "source", pair / "target", device="cuda", **QUICK)
    assert result["kept"]
    assert result["native"]["device"] == torch.cuda.get_device_name()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there(pair: Path) -> None:
    with pytest.raises(InputError, match="no GPU"):
        growkit.verify(pair / "source", pair / "target", device="cuda", **QUICK)
