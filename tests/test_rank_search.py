"""A search for ranks shows where it is and what it tried; ranks that only take room are told.

What is kept is judged by torch's singular values of the files' tensors, what it takes by files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import growkit
from growkit.cli.app import app
from tests.conftest import save_model
from tests.test_ranks import SIZES, plan

ENERGY = {"rank": "auto", "energy": 0.8}
TOLERANCE = {"rank": "auto", "tolerance": 0.05}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("place") / "source", "diffllama", **SIZES)


def convert(source: Path, **options: Any) -> Any:
    return growkit.convert(source, source.parent / "out", "shared-diff", dry_run=True, **options)


def shown_by(source: Path, **options: Any) -> str:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    arguments = ["convert", str(source), str(source.parent / "out"), "--to", "shared-diff", *words]
    done = CliRunner().invoke(app, [*arguments, "--dry-run"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout


def test_the_table_of_a_tolerance(source: Path) -> None:
    ranks = convert(source, **TOLERANCE)["ranks"]
    found = plan(source, **TOLERANCE)
    assert {each["rank"]: each["kl_nats_per_token"] for each in ranks} == found.kl_by_rank
    assert len(ranks) > 1
    (chosen,) = (each["rank"] for each in ranks if each["chosen"])
    assert found.lineage.target.config["shared_rank"] == chosen
    assert {(each["layer"], each["energy"]) for each in ranks} == {(None, None)}
    table = shown_by(source, **TOLERANCE)
    for each in ranks:
        end = f" +│ {'yes' if each['chosen'] else 'no'}"
        assert re.search(rf"^{each['rank']} +│ {each['kl_nats_per_token']:.3g}{end}", table, re.M)


def test_the_table_of_an_energy(source: Path) -> None:
    result = convert(source, **ENERGY)
    state = load_file(source / "model.safetensors")
    for each in result["ranks"]:
        squares = []
        for name in ("q_proj", "k_proj"):
            weight = state[f"model.layers.{each['layer']}.self_attn.{name}.weight"].double()
            first, second = weight.view(2, -1, SIZES["head_dim"], weight.shape[1])
            squares += [torch.linalg.svdvals(d).square() for d in first - second]
        kept = sum(float(s[: 2 * each["rank"]].sum()) for s in squares)
        assert each["energy"] == pytest.approx(kept / sum(float(s.sum()) for s in squares))
        assert each["energy"] >= 0.8 or not each["chosen"]
    chosen = [each for each in result["ranks"] if each["chosen"]]
    assert [each["layer"] for each in chosen] == [0, 1]
    table = shown_by(source, **ENERGY)
    for each in chosen:
        assert re.search(
            rf"^{each['layer']} +│ {each['rank']} +│ {each['energy']:.3g}", table, re.M
        )


def held(folder: Path) -> int:
    """Parameters of what makes queries and keys."""
    state = load_file(folder / "model.safetensors")
    return sum(t.numel() for name, t in state.items() if re.search(r"[qk]_proj\.", name))


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_a_rank_that_only_takes_room_is_told(scope: str, source: Path, tmp_path: Path) -> None:
    before, larger = held(source), {}
    for rank in range(1, 5):
        out = tmp_path / str(rank)
        options: dict[str, Any] = {"rank": rank, "scope": scope, "verify": False}
        result = growkit.convert(source, out, "shared-diff", **options)
        larger[rank] = held(out) > before
        assert bool(result["warnings"]) == larger[rank]
        if larger[rank]:
            (warning,) = result["warnings"]
            assert f"{held(out):,} parameters in the place of {before:,}" in warning
            most = int(re.search(r"ranks up to (\d+) hold fewer", warning)[1])  # type: ignore[index]
            assert held(tmp_path / str(most)) < before <= held(tmp_path / str(most + 1))
            assert f"warning: {warning}" in shown_by(source, rank=rank, scope=scope)
    assert not larger[1]
    assert larger[4] == (scope == "head")
