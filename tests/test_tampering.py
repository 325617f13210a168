"""A few of the tampered folders of ``tests.tampering``; by hand, hundreds are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

import growkit
from growkit.proof.folder import FolderDifferences
from tests import tampering

CASES = tampering.cases(len(tampering.TAMPERINGS), seed=1)[::2]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    tampering.make_pairs(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].part}-{c[0].name}-{c[1]}-{c[2]}")
@pytest.mark.sampled(10)
def test_a_difference_is_named(
    case: tuple[tampering.Tampering, str, bool, int], pairs: Path, tmp_path: Path
) -> None:
    assert tampering.tried(case, pairs, tmp_path) is None


@pytest.mark.parametrize(
    ("pair", "keeps"), [("llama", True), ("diff", False), ("bounded", False), ("experts", False)]
)
def test_untouched_folders(pair: str, keeps: bool, pairs: Path, tmp_path: Path) -> None:
    """The control; without a manifest, what is to be lossy is held to be the same."""

    def untouched(folder: Path, choose: object) -> str:
        return "nothing"

    case = tampering.Tampering("nothing", "none", untouched), pair, keeps, 0
    wrong = tampering.tried(case, pairs, tmp_path)
    assert (wrong or "").startswith("kept") is (keeps or pair != "bounded"), wrong
    if pair == "llama" and keeps:
        result = growkit.verify(pairs / pair / "source", pairs / pair / "target", prompts=1)
        assert (result["changed"], result["notes"], result["unknown_files"]) == ([], [], [])


def test_the_study_sees_a_verdict_that_is_blind(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the study: a proof that compares nothing but logits does not pass it."""
    monkeypatch.setattr("growkit.proof.verdict.compare_folders", lambda *_: FolderDifferences())
    spoil = tampering.added("notes.txt")
    case = tampering.Tampering("a file", "rest", spoil), "llama", True, 0
    assert (tampering.tried(case, pairs, tmp_path) or "").startswith("kept")
