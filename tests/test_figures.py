"""The charts of the documents are drawn from what was measured."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.figures import KINDS, drawn

ROOT = Path(__file__).parents[1]
FILES = {"first-steps": "first-steps.svg", "symmetry": "parting.svg"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_show_what_was_measured(kind: str, tmp_path: Path) -> None:
    (runs,) = (ROOT / "benchmarks" / "results").glob(f"*-{kind}-cpu.jsonl")
    made = drawn(kind, runs)
    assert made == (ROOT / "docs" / FILES[kind]).read_text("utf-8")
    ElementTree.fromstring(made)
    fewer = runs.read_text("utf-8").splitlines()[:-1]
    (tmp_path / "fewer").write_text("\n".join(fewer), "utf-8")
    assert drawn(kind, tmp_path / "fewer") != made  # the control
