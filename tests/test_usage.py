"""What people do with a folder as a whole, and whether the new capacity can learn."""

import errno
import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

import growkit
from growkit.base.errors import PlaceError
from growkit.base.settings import Settings
from growkit.engine import transformers_class
from growkit.engine.layerwise import Layerwise
from growkit.extras.optimizer.checks import trainability
from growkit.extras.optimizer.layerwise_gradients import layerwise_gradients
from growkit.model.checkpoint.scratch import Scratch
from growkit.proof import mode_results as ways
from tests.architectures import config_of, save
from tests.files import edit_weights, listed
from tests.models import Make, relative_error, save_model, save_random

QUICK = {"prompts": 2, "length": 12}


@pytest.mark.usage
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "diffllama", "diff_transformer", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_models_are_saved_and_generate(kind: str, tied: bool, make: Make, tmp_path: Path) -> None:
    options = {"num_key_value_heads": 4} if kind == "diff_transformer" else {}
    source = make(kind, tie_word_embeddings=tied, **options)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    modes = {mode["name"]: mode for mode in result["verification"].sections.modes.modes}
    assert result["kept"], result["verification"]["reason"]
    assert modes["save and reload"]["kept"] is True
    assert modes["generate"]["kept"] is True
    assert "the same 16 tokens" in modes["generate"]["note"]
    tried = {"prefill", "cached decoding", "left padding", "explicit positions", "longest context"}
    assert modes.keys() - {"long texts"} == tried | {"save and reload", "generate", "loss"}


@pytest.mark.sampled(1)
@pytest.mark.usage
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        RuntimeError("unable to mmap 4 bytes from file <model.safetensors>: File too large (27)"),
    ],
    ids=["full", "broken", "safetensors", "torch"],
)
def test_a_full_disk_is_no_fault_of_the_target(
    error: Exception, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source, which is smaller, has room."""
    source, save = make("llama"), LlamaForCausalLM.save_pretrained

    def full(model: Any, folder: Path) -> None:
        if model.config.hidden_size > 16:
            raise error
        save(model, folder)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(PlaceError, match="cannot hold temporary files"):
        growkit.grow(source, tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    assert not [*tmp_path.glob("out*")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(5))
def test_no_fault_of_the_place_becomes_a_verdict(
    number: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each temporary folder fails once; some are made where any exception means "not known"."""
    transformers_class.parsed_text.cache_clear()
    tried = count()
    make_folder = Scratch.make

    def fail_once(scratch: Scratch) -> None:
        if next(tried) == number:
            raise OSError(errno.ESTALE, "Stale file handle", str(scratch.path))
        make_folder(scratch)

    monkeypatch.setattr(Scratch, "make", fail_once)
    with pytest.raises(PlaceError, match=r"cannot hold temporary files .*Stale"):
        growkit.grow(make("llama"), tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    assert not [*tmp_path.glob("*out*")]


@pytest.mark.usage
def test_a_temporary_folder_needs_a_name_in_utf_8(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/\udcff")
    with pytest.raises(PlaceError, match=r"set TMPDIR to a folder .* name in UTF-8"):
        growkit.grow(make("llama"), tmp_path / "out", hidden="x2", dry_run=True)


@pytest.mark.usage
def test_other_text_is_noticed(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    with edit_weights(tmp_path / "out") as tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    result = growkit.verify(source, tmp_path / "out", **QUICK)
    modes = {mode["name"]: mode for mode in result.sections.modes.modes}
    assert modes["generate"]["kept"] is False
    sentences = {each["name"]: each["sentence"] for each in result.findings}
    assert sentences["prefill"] == "prefill"  # it has nothing to explain
    assert modes["generate"]["note"].endswith(" of 16 tokens are the same, greedily")
    assert modes["save and reload"]["kept"] is True


@pytest.mark.sampled(1)
@pytest.mark.usage
@pytest.mark.parametrize("padding", [1, None])
def test_a_class_that_loads_other_weights_is_noticed(padding: int | None, tmp_path: Path) -> None:
    """Youtu's empties the row of the padding token while it loads, in the head only if tied."""
    config = config_of("youtu", pad_token_id=padding)
    source = save_random(tmp_path / "source", config, 0)
    with edit_weights(source) as tensors:  # a token that no continuation chooses
        tensors["model.embed_tokens.weight"][1] *= 0.01
    growkit.grow(source, tmp_path / "out", ffn="x2", untie=True, verify=None)
    result = growkit.verify(source, tmp_path / "out", **QUICK)
    modes = {mode["name"]: mode for mode in result.sections.modes.modes}
    assert modes["prefill"]["kept"], result["reason"]
    assert result["kept"] == modes["generate"]["kept"] == (padding is None)
    assert ("as transformers loads them, the" in modes["generate"]["note"]) == bool(padding)
    assert (relative_error(source, tmp_path / "out") < 1e-12) == (padding is None)


@pytest.mark.usage
def test_large_models_are_not_loaded_whole(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "MAX_WHOLE_MODELS", 1000)
    result = growkit.grow(make("llama"), tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    modes = {mode["name"]: mode for mode in result["verification"].sections.modes.modes}
    assert modes["generate"]["kept"] is None
    assert not modes["generate"]["tried"]
    assert result["kept"]


@pytest.mark.parametrize("symmetry", ["break", "keep"])
def test_whether_it_can_learn_has_its_own_verdict(
    symmetry: str, make: Make, tmp_path: Path
) -> None:
    source, target = make("llama"), tmp_path / "out"
    growkit.grow(source, target, hidden="x2", symmetry=symmetry, verify=None)
    result = growkit.verify(source, target, trainability=True, **QUICK)
    assert result.sections.trainability.trainable == (symmetry == "break")
    assert result["kept"] == (symmetry == "break")
    assert ("cannot train as asked" in result["reason"]) == (symmetry == "keep")
    mlp = [each for each in result.sections.trainability.symmetry if "gate_proj" in each["tensor"]]
    assert mlp
    for each in mlp:
        gain, distance = each["effective_rank_gain"], each["relative_distance"]
        assert (abs(gain) < 1e-6, distance < 1e-9) == ((symmetry == "keep",) * 2), each


def test_the_cpu_computes_gradients_that_a_device_cannot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, devices = make("llama"), list[torch.device]()

    def fail_once(model: Layerwise, *arguments: Any) -> list[str]:
        devices.append(model.device)
        if len(devices) == 1:
            raise torch.OutOfMemoryError("no room")
        return layerwise_gradients(model, *arguments)

    monkeypatch.setattr(trainability, "layerwise_gradients", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        growkit.verify(source, source, trainability=True, **QUICK)
    devices.clear()
    monkeypatch.setattr(trainability, "CPU", torch.device("cpu", 0))  # not the proof's device
    result = growkit.verify(source, source, trainability=True, **QUICK)
    assert result["kept"]
    assert "the CPU did: no room" in result.sections.trainability.notes[0]
    assert devices == [torch.device("cpu"), torch.device("cpu", 0)]


@pytest.mark.usage
def test_a_class_without_gradients_by_layer_is_proved_nonetheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Zaya hand on float tensors beside the hidden states."""
    monkeypatch.setattr(ways, "MAX_WHOLE_MODELS", 1000)
    source, out = save("zaya", tmp_path / "source", num_hidden_layers=2), tmp_path / "out"
    result = growkit.grow(source, out, method="depth", layers="x2", verify=Settings(**QUICK))
    section = result["verification"].sections.trainability
    assert (result["kept"], section.trainable) == (True, None)
    assert "not checked" in section.notes[0]
    with pytest.raises(growkit.InputError, match="layers pass on more than hidden states"):
        growkit.verify(source, out, trainability=True, **QUICK)


def test_a_parameter_without_gradient_is_named(make: Make) -> None:
    source = make("llama")
    with edit_weights(source) as tensors:
        tensors["model.layers.1.self_attn.o_proj.weight"] *= 0
    result = growkit.verify(source, source, trainability=True, **QUICK)
    assert (
        "model.layers.1.self_attn.v_proj.weight" in result.sections.trainability.silent_parameters
    )
    assert not result["kept"]
    assert growkit.verify(source, source, **QUICK)["kept"]


SETTINGS: tuple[dict[str, Any], ...] = listed("usage", "settings")


@pytest.mark.sampled(1)
@pytest.mark.usage
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: next(iter(each)))
def test_settings_of_generation_lose_no_growth(
    settings: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    source = make("llama", num_hidden_layers=1)
    (source / "generation_config.json").write_text(json.dumps(settings))
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    modes = {mode["name"]: mode for mode in result["verification"].sections.modes.modes}
    assert result["kept"], result["verification"]["reason"]
    assert modes["generate"]["note"] == "the same 16 tokens, greedily"
    assert modes["save and reload"]["kept"] is True


def test_a_bias_that_is_tied_has_a_gradient(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert", is_decoder=True)
    found = growkit.verify(tmp_path / "model", tmp_path / "model", trainability=True, **QUICK)
    assert found.sections.trainability.silent_parameters == []
