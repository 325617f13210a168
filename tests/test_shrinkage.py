"""How far all inputs count alike, whatever a text has: what costs least on the text is taken.

Costs are judged by converting with every shrinkage, loading with transformers, and plain torch.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from growkit.checkpoint.folder import read_json
from growkit.checkpoint.reading import Checkpoint
from growkit.cli.demo import MODEL, held_out_text, training_text
from growkit.conversions import shared_diff as search
from growkit.conversions.shared_diff import SHRINKAGES, Calibration
from growkit.engine import calls
from growkit.engine.prompts import make_prompts
from growkit.engine.texts import DOCUMENT_SEPARATOR
from tests.conftest import seeded
from tests.test_calibration import as_read, by_hooks, close, windows
from tests.test_ranks import divergence, plan, probabilities


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    documents = (training_text()[start : start + 150] for start in (20_000, 40_000))
    file.write_text(DOCUMENT_SEPARATOR.join(documents))
    return str(file)


def shared(source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    growkit.convert(source, target, "shared-diff", overwrite=True, verify=False, **options)
    return load_file(target / "model.safetensors")


def settled(target: Path) -> dict[str, Any]:
    (step,) = read_json(target / "growkit.json")["recipe"]["steps"]
    assert isinstance(step, dict)
    return step


@pytest.mark.parametrize("seed", range(3))
def test_a_part_is_spread_evenly(seed: int, make: Callable[..., Path]) -> None:
    folder = make("diffllama", dtype=torch.float64)
    shrinkage = seeded(seed).random()
    found = Calibration(as_read(folder), windows())
    for layer, moment in enumerate(by_hooks(folder, windows())):
        values = torch.linalg.eigvalsh(moment)
        expected = (1 - shrinkage) * values + shrinkage * values.mean()
        shrunk = torch.linalg.eigvalsh(found.moment(layer, shrinkage))
        assert close(shrunk, expected, 1e-5)  # they run in float32
        assert not close(shrunk, values, 1e-3)


@pytest.mark.parametrize(("scope", "rank"), [("head", 1), ("head", 4), ("layer", 3)])
def test_what_costs_least_is_taken(scope: str, rank: int, text: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scope": scope, "rank": rank, "dtype": "float32"}
    options["calibration"] = text
    tokens = make_prompts(Settings(text), MODEL, read_json(MODEL / "config.json")).windows
    expected, costs = probabilities(MODEL, tokens), {}
    for shrinkage in SHRINKAGES:
        shared(MODEL, tmp_path / "each", shrinkage=shrinkage, **options)
        assert float(settled(tmp_path / "each")["shrinkage"]) == shrinkage
        costs[shrinkage] = divergence(expected, probabilities(tmp_path / "each", tokens))
    once = shared(MODEL, tmp_path / "out", **options)
    found = float(settled(tmp_path / "out")["shrinkage"])
    assert costs[found] <= min(costs.values()) * (1 + 1e-5)
    assert max(costs.values()) > 1.01 * min(costs.values())  # the control: it matters
    again = shared(MODEL, tmp_path / "again", shrinkage=found, **options)
    assert all(once[name].equal(again[name]) for name in once)


def test_a_text_pays_where_it_was_not_read(tmp_path: Path) -> None:
    """Less is lost on held-out text than without calibration, also at a rank that loses a lot."""
    texts = {"calibration": training_text()[:4_096], "held_out": held_out_text()}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    config = read_json(MODEL / "config.json")
    held_out = make_prompts(Settings(str(tmp_path / "held_out"), 6), MODEL, config).windows
    expected = probabilities(MODEL, held_out)
    for rank in (1, 4):
        costs = []
        for options in ({}, {"calibration": str(tmp_path / "calibration")}):
            shared(MODEL, tmp_path / "out", rank=rank, dtype="float32", **options)
            costs.append(divergence(expected, probabilities(tmp_path / "out", held_out)))
        assert costs[1] < costs[0], rank


def test_all_inputs_alike_are_held_to_the_optimum(text: str, tmp_path: Path) -> None:
    """A proof judges updates unless a text weighed them; then other ones are the best."""
    options: dict[str, Any] = {"rank": 2, "calibration": text, "dtype": "float32"}
    for shrinkage in (0, 1):
        way = plan(MODEL, shrinkage=shrinkage, **options)
        check = next(check for each in way.lineage.plans for check in each.checks)
        weights = [Checkpoint(MODEL).read(name).float() for name in check.sources]
        shared(MODEL, tmp_path / "out", shrinkage=1 - shrinkage, **options)
        stored = load_file(tmp_path / "out" / "model.safetensors")
        # Updates of the other way are not the best ones for all inputs alike.
        kept = check.judge(weights, [stored[name] for name in check.targets]).kept
        assert kept is (shrinkage == 0)


def test_a_tolerance_takes_the_cheapest_way(text: str) -> None:
    options: dict[str, Any] = {"rank": "auto", "tolerance": 0.1, "calibration": text}
    free = plan(MODEL, **options).kl_by_rank
    fixed = [plan(MODEL, shrinkage=each, **options).kl_by_rank for each in SHRINKAGES]
    for rank, cost in free.items():
        costs = [each[rank] for each in fixed if rank in each]
        assert cost == pytest.approx(min(costs), rel=1e-5)


def test_the_model_runs_once_and_leaves_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    runs, real = [], search._run

    def counted(*args: Any) -> Iterator[None]:
        runs.append(1)
        return real(*args)

    monkeypatch.setattr(search, "_run", counted)
    shared(MODEL, tmp_path / "out", rank="auto", tolerance=0.1, calibration=text)
    assert len(runs) == 1
    assert not list(scratch.iterdir())


def test_no_room_for_moments(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(calls, "save_file", full)
    with pytest.raises(InputError, match=r"growkit-.*cannot take 131,072 bytes.*TMPDIR"):
        shared(MODEL, tmp_path / "out", rank=2, calibration=text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shrinkage": 0.5}, "shrinkage goes with a calibration text"),
        ({"shrinkage": 1.5}, r"shrinkage is '1\.5'; give .* \(SHARE\)"),
        ({"shrinkage": -0.1}, "shrinkage is '-0.1'"),
        ({"shrinkage": "nan"}, "shrinkage is 'nan'"),
        ({"shrinkage": "much"}, "shrinkage is 'much'"),
    ],
    ids=str,
)
def test_what_is_no_shrinkage(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        shared(MODEL, tmp_path / "out", rank=2, **options)
    assert not (tmp_path / "out").exists()
