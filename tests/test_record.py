"""A manifest is data from a stranger: it opens no file, and its odd values end in a sentence."""

from __future__ import annotations

import json
import random
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import prompts
from growkit.proof.weights import origin_of
from growkit.recipe.manifest import read_record
from growkit.report.proof import proof_view
from tests.conftest import save_model
from tests.test_calibration import with_tokenizer

QUICK: dict[str, Any] = {"prompts": 1, "length": 10}
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 10**18, 10**300, 1e308, -0.0, "", "x2", "x0", "x-1"),
    *("auto", "x99999999", "1e999", "/dev/zero", "\x1b[31m\n", "Ａ" * 3000, [], [[]], [{}], {}),
    *({"a": {}}, {"grow": "hypercloning"}, {"convert": "llama"}, ["x2"], [None], {"steps": []}),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, its grown target, and the same converted with a rank that was found on a text."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8, vocab_size=256)
    with_tokenizer(source)
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    growkit.grow(source, folder / "target", hidden="x2", verify=False)
    options: dict[str, Any] = {"rank": "2", "calibration": str(text), "shrinkage": "0.5"}
    growkit.convert(source, folder / "shared", to="shared-diff", verify=False, **options)
    return folder


@pytest.fixture
def target(pair: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pair / "target", tmp_path / "target")


def record(folder: Path, manifest: Any) -> None:
    (folder / "growkit.json").write_text(json.dumps(manifest))


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in what JSON holds."""
    items: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        items = list(content.items())
    if isinstance(content, list):
        items = list(enumerate(content[:3]))
    return [path, *(found for key, value in items for found in places(value, (*path, key)))]


def with_odd(manifest: Any, path: tuple[Any, ...], odd: Any) -> Any:
    spoiled = deepcopy(manifest)
    if not path:
        return odd
    at = spoiled
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = odd
    return spoiled


def test_odd_values_everywhere(pair: Path, target: Path) -> None:
    """Every value of the recipe, and each kind of odd one: a sentence, or said to be unusable."""
    manifest = json.loads((target / "growkit.json").read_text())
    manifest = {"recipe": manifest["recipe"]}
    source, checkpoint = Checkpoint(pair / "source"), Checkpoint(target)
    record(target, manifest)
    assert origin_of(source, checkpoint, read_record(checkpoint)).unknown is None
    found = []
    for path in places(manifest):
        for odd in ODD:
            record(target, with_odd(manifest, path, odd))
            try:
                recorded = read_record(checkpoint)
            except InputError:
                continue
            found.append(origin_of(source, checkpoint, recorded).unknown)
    assert None in found
    assert any(unknown and "does not fit" in unknown for unknown in found)


@pytest.mark.parametrize("seed", range(3))
def test_whole_proofs_with_odd_manifests(seed: int, pair: Path, target: Path) -> None:
    choose = random.Random(seed)
    manifest = json.loads((target / "growkit.json").read_text())
    path = choose.choice([path for path in places(manifest) if path])
    record(target, with_odd(manifest, path, choose.choice(ODD)))
    try:
        result = growkit.verify(pair / "source", target, **QUICK)
    except InputError:
        return
    proof_view(result, json.loads((target / "growkit.json").read_text()))
    json.dumps(result, allow_nan=False)


def test_a_recipe_that_does_not_fit_is_no_missing_manifest(pair: Path, target: Path) -> None:
    manifest = json.loads((target / "growkit.json").read_text())
    manifest["recipe"]["steps"] = [{"convert": "dint"}, {"convert": "llama"}]
    record(target, manifest)
    result = growkit.verify(pair / "source", target, **QUICK)
    assert result["weights_recovered"] is None
    assert "the recipe in the target's manifest does not fit this source" in result["reason"]
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    result = growkit.verify(pair / "source", target, **QUICK)
    assert not result["kept"]
    assert "max_position_embeddings" in result["reason"]


def test_the_recipe_of_another_growth(pair: Path, target: Path) -> None:
    """It fits the source, but not the target."""
    manifest = json.loads((target / "growkit.json").read_text())
    manifest["recipe"]["steps"][0]["hidden"] = "x3"
    record(target, manifest)
    assert not growkit.verify(pair / "source", target, **QUICK)["kept"]


def test_a_calibrated_manifest_is_checked_without_its_text(pair: Path, tmp_path: Path) -> None:
    shared = shutil.copytree(pair / "shared", tmp_path / "shared")
    manifest = json.loads((shared / "growkit.json").read_text())
    (step,) = manifest["recipe"]["steps"]
    step["calibration"] = "/nowhere/at/all.txt"
    record(shared, manifest)
    result = growkit.verify(pair / "source", shared, **QUICK)
    assert result["weights_recovered"] is True
    assert result["kept"], result["reason"]


@pytest.mark.parametrize("found", [{}, {"shrinkage": "0.5"}])
@pytest.mark.parametrize("rank", ["2", "auto"])
def test_a_manifest_has_no_file_read(
    rank: str,
    found: dict[str, str],
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``/dev/zero`` never ends."""
    monkeypatch.setattr(prompts, "_tokenize", lambda *_: pytest.fail("a text was read"))
    shared = shutil.copytree(pair / "shared", tmp_path / "shared")
    manifest = json.loads((shared / "growkit.json").read_text())
    step = {"convert": "shared-diff", "rank": rank, "calibration": "/dev/zero"} | found
    manifest["recipe"]["steps"] = [step | ({"tolerance": "1"} if rank == "auto" else {})]
    manifest["recipe"] |= {"source": "/dev/zero", "output": "/dev/zero"}
    manifest["recipe"]["verify"] = {"text": "/dev/zero"}
    record(shared, manifest)
    result = growkit.verify(pair / "source", shared, **QUICK)
    settled = rank == "2" and bool(found)
    assert (result["weights_recovered"] is None) is not settled
    assert ("does not say what was found" in result["reason"]) is not settled


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"recipe": []}', b"[" * 100_000])
def test_damaged_manifests(content: bytes, pair: Path, target: Path) -> None:
    (target / "growkit.json").write_bytes(content)
    with pytest.raises(InputError, match=r"growkit\.json"):
        growkit.verify(pair / "source", target, **QUICK)
