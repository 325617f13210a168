"""What people do with a folder as a whole, and whether the new capacity can learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import growkit
from growkit.base.settings import Settings
from growkit.cli.app import app
from growkit.proof import modes as ways
from tests.conftest import save_model
from tests.test_verify import spoil

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
    spoil(tmp_path / "out", lambda t: t["lm_head.weight"].copy_(t["lm_head.weight"].flip(0)))
    result = growkit.verify(source, tmp_path / "out", **QUICK)
    modes = {mode["name"]: mode for mode in result["modes"]}
    assert modes["generate"]["kept"] is False
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
    assert "not tried" in modes["generate"]["note"]
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
    spoil(source, lambda t: t["model.layers.1.self_attn.o_proj.weight"].zero_())
    result = growkit.verify(source, source, trainability=True, **QUICK)
    assert result["trainability"] is not None
    assert "model.layers.1.self_attn.v_proj.weight" in result["trainability"]["silent_parameters"]
    assert not result["kept"]
    assert growkit.verify(source, source, **QUICK)["kept"]


def test_reports_on_the_command_line(make: Make, tmp_path: Path) -> None:
    source, folder = str(make("llama")), tmp_path
    page, data = folder / "report.html", folder / "report.json"
    quick = ["--prompts", "2", "--length", "12"]
    arguments = ["grow", source, str(folder / "out"), "--hidden", "x2", "--report", str(page)]
    assert CliRunner().invoke(app, [*arguments, *quick]).exit_code == 0
    assert "Preserved" in page.read_text()
    arguments = ["verify", source, str(folder / "out"), "--report", str(data)]
    assert CliRunner().invoke(app, [*arguments, *quick]).exit_code == 0
    assert json.loads(data.read_text())["kept"] is True


@pytest.mark.parametrize("name", ["report.pdf", "missing/report.html"])
def test_a_report_that_cannot_be_written_is_found_out_first(
    name: str, make: Make, tmp_path: Path
) -> None:
    source = str(make("llama"))
    report = ["--report", str(tmp_path / name)]
    found = CliRunner().invoke(app, ["verify", source, source, *report])
    assert found.exit_code == 2


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


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1, 2], [1, 2], "the same 2 tokens, greedily"),
        ([1, 2], [1, 3], "the first 1 of 2 tokens are the same, greedily"),
        ([1, 2], [3, 2], "none of 2 tokens are the same, greedily"),
    ],
)
def test_generated_texts_are_compared_in_words(one: list[int], other: list[int], said: str) -> None:
    assert ways._same_text(one, lambda: other, exact=True)["note"] == said
