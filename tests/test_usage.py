"""What people do with a folder as a whole, and whether the new capacity can learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import growkit
from growkit.base.settings import Settings
from growkit.proof import modes as ways
from tests.conftest import edit_weights, save_model

QUICK = {"prompts": 2, "length": 12}
Make = Callable[..., Path]


@pytest.mark.usage
@pytest.mark.parametrize("kind", ["llama", "diffllama", "diff_transformer", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_models_are_saved_and_generate(kind: str, tied: bool, make: Make, tmp_path: Path) -> None:
    options = {"num_key_value_heads": 4} if kind == "diff_transformer" else {}
    source = make(kind, tie_word_embeddings=tied, **options)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    assert result["verification"] is not None
    modes = {mode["name"]: mode for mode in result["verification"]["modes"]}
    assert result["kept"], result["verification"]["reason"]
    assert modes["save and reload"]["kept"] is True
    assert modes["generate"]["kept"] is True
    assert "the same 16 tokens" in modes["generate"]["note"]
    tried = {"prefill", "cached decoding", "left padding", "explicit positions", "longest context"}
    assert modes.keys() == tried | {"save and reload", "generate"}


@pytest.mark.usage
def test_other_text_is_noticed(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    with edit_weights(tmp_path / "out") as tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    result = growkit.verify(source, tmp_path / "out", **QUICK)
    modes = {mode["name"]: mode for mode in result["modes"]}
    assert modes["generate"]["kept"] is False
    assert modes["generate"]["note"].endswith(" of 16 tokens are the same, greedily")
    assert modes["save and reload"]["kept"] is True


@pytest.mark.usage
def test_large_models_are_not_loaded_whole(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "MOST_BYTES", 1000)
    result = growkit.grow(make("llama"), tmp_path / "out", hidden="x2", verify=Settings(**QUICK))
    assert result["verification"] is not None
    modes = {mode["name"]: mode for mode in result["verification"]["modes"]}
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
    assert result["trainability"] is not None
    assert result["trainability"]["trainable"] == (symmetry == "break")
    assert result["kept"] == (symmetry == "break")
    assert ("cannot train as asked" in result["reason"]) == (symmetry == "keep")
    mlp = [each for each in result["symmetry"] if "gate_proj" in each["tensor"]]
    assert mlp
    for each in mlp:
        gain, distance = each["effective_rank_gain"], each["relative_distance"]
        assert gain is not None
        assert (abs(gain) < 1e-6, distance < 1e-9) == ((symmetry == "keep",) * 2), each


def test_a_parameter_without_gradient_is_named(make: Make) -> None:
    source = make("llama")
    with edit_weights(source) as tensors:
        tensors["model.layers.1.self_attn.o_proj.weight"] *= 0
    result = growkit.verify(source, source, trainability=True, **QUICK)
    assert result["trainability"] is not None
    assert "model.layers.1.self_attn.v_proj.weight" in result["trainability"]["silent_parameters"]
    assert not result["kept"]
    assert growkit.verify(source, source, **QUICK)["kept"]


@pytest.mark.parametrize("rank", [1, 2])
def test_spectra_of_shared_projections(rank: int, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama", dtype=torch.float64)
    result = growkit.convert(
        source, tmp_path / "out", to="shared-diff", rank=rank, verify=Settings(**QUICK)
    )
    assert result["verification"] is not None
    spectra = result["verification"]["spectra"]
    assert len(spectra) == 4  # queries and keys of two layers
    for each in spectra:
        assert each["residual"] == pytest.approx(each["best"], rel=1e-9, abs=1e-20)
