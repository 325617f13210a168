"""The charts of the documents: round numbers at their axes, and lines that can be told apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.figures import KINDS, STYLE, Panel, drawn

ROOT = Path(__file__).parents[1]
FILES = {"first-steps": "first-steps.svg", "symmetry": "parting.svg"}


def texts(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [each.text or "" for each in found]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.37, 0.93], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-0.13, 0.31], ["-0.2", "-0.1", "0", "0.1", "0.2", "0.3", "0.4"]),
        ([-7.0, -1.5], ["-8", "-6", "-4", "-2", "0"]),
    ],
)
def test_numbers_are_round_on_both_sides_of_zero(values: list[float], expected: list[str]) -> None:
    points = [(float(step), value) for step, value in enumerate(values, 1)]
    svg = drawn([Panel("p", "number of steps", {"one": points})], "t")
    shown = texts(svg)
    assert [each for each in shown if each in expected][: len(expected)] == expected
    assert "number of steps" in shown


def test_lines_differ_by_more_than_their_colour() -> None:
    dashes = dict(re.findall(r"\.(c\d) \{ stroke-dasharray: ([\d ]+) \}", STYLE))
    styles = set(re.findall(r"\.(c\d) \{ stroke:", STYLE))
    assert len({dashes.get(each, "") for each in styles}) == len(styles)


@pytest.mark.parametrize("kind", KINDS)
def test_the_documents_show_what_was_measured(kind: str) -> None:
    (runs,) = (ROOT / "benchmarks" / "results").glob(f"*-{kind}-cpu.jsonl")
    lines = [json.loads(line) for line in runs.read_text("utf-8").splitlines()]
    panels, title = KINDS[kind]
    made = drawn(panels([line for line in lines if "run" in line]), title)
    assert made == (ROOT / "docs" / FILES[kind]).read_text("utf-8")
