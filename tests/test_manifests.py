"""The lies of ``tests.manifests``: a few, and hundreds with ``--all``."""

from __future__ import annotations

from pathlib import Path

import pytest

from growkit.proof.folder import FolderDifferences
from tests import manifests
from tests.conftest import edit_json


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> manifests.Pair:
    return manifests.make_pair("mistral", "sizes", tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("number", range(len(manifests.LIES)))
def test_no_lie_is_believed(number: int, pair: manifests.Pair, tmp_path: Path) -> None:
    outcome = manifests.tried(pair, manifests.LIES[number], number, tmp_path)
    assert outcome.what != "believed", outcome.said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(300))
def test_no_lie_about_any_family_is_believed(number: int, tmp_path: Path) -> None:
    ways = manifests.ways()
    pair = manifests.make_pair(*ways[number % len(ways)], tmp_path / "pair")
    (tmp_path / "copy").mkdir()
    tell = manifests.LIES[number % len(manifests.LIES)]
    outcome = manifests.tried(pair, tell, number, tmp_path / "copy")
    assert outcome.what != "believed", outcome.said


def test_the_study_sees_a_verdict_that_is_blind(
    pair: manifests.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the study: who compares short prompts alone believes another window."""
    monkeypatch.setattr("growkit.proof.verdict.compare_folders", lambda *_: FolderDifferences())

    def another_window(pair: manifests.Pair, folder: Path, choose: object) -> str:
        with edit_json(folder / "config.json") as config:
            config["sliding_window"] = 40
        return "sliding_window"

    outcome = manifests.tried(pair, another_window, 0, tmp_path)
    assert outcome.what == "believed", outcome.said
    assert "logits" in outcome.said
