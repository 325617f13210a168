"""What ``growkit families`` says of families is what happens to models of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import growkit.catalogue
from growkit.catalogue import Abilities, Answer
from growkit.cli import app
from growkit.families.example import example
from growkit.families.family import families
from growkit.planner import change
from growkit.recipe.steps import GrowStep
from tests.catalogue import FILE, as_markdown, keeps, outcome, random_model
from tests.conftest import seeded

COMMAND = """
import sys
from growkit.cli import app
try:
    app(["families", "--json"])
except SystemExit:
    assert not {"torch", "transformers"} & set(sys.modules)
    raise
"""


@pytest.fixture(scope="module")
def rows() -> list[Abilities]:
    """As the command prints them, which does not wait for torch."""
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, check=True)
    found = json.loads(done.stdout)
    for row in found:
        for verb in ("grow", "convert"):
            row[verb] = [Answer(**each) for each in row[verb]]
    return [Abilities(**row) for row in found]


def test_every_family_is_there(rows: list[Abilities]) -> None:
    assert {row.family for row in rows} == {family.name for family in families().values()}
    assert all(answer.promise or answer.why for row in rows for answer in row.grow + row.convert)


def test_the_page_shows_what_the_command_says(
    rows: list[Abilities], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m tests.catalogue`` writes it."""
    assert as_markdown(rows) in FILE.read_text("utf-8")
    monkeypatch.setattr(growkit.catalogue, "catalogue", lambda: rows[:3])
    shown = CliRunner().invoke(app, ["families"]).stdout
    assert all(row.family in shown for row in rows[:3])
    rows[0].grow[0].promise = None  # the control: another answer is another page
    assert as_markdown(rows) not in FILE.read_text("utf-8")
    rows[0].grow[0].promise = "exact"


@pytest.mark.parametrize("kind", ["gemma2", "llama", "mixtral", "olmo", "phi"])
def test_answers_come_true(kind: str, rows: list[Abilities], tmp_path: Path) -> None:
    """Some of them, with one that is a refusal; and other answers would not."""
    row = next(row for row in rows if kind in row.model_types)
    seed = len(kind)
    source, tied = random_model(kind, seed, tmp_path / "source")
    asked = [("grow", each) for each in row.grow if each.tied == tied]
    asked += [("convert", each) for each in row.convert]
    choose = seeded(seed)
    done = choose.sample([each for each in asked if each[1].promise], 2)
    refused = choose.choice([each for each in asked if not each[1].promise])
    for number, (verb, answer) in enumerate([*done, refused]):
        found = outcome(verb, answer, source, tmp_path / str(number))
        assert keeps(answer.promise, found), (answer, found)
        others = {"exact", "bounded", "different", None} - {answer.promise}
        assert not any(keeps(other, found) for other in others), answer


def test_rounding_is_no_exactness(rows: list[Abilities], tmp_path: Path) -> None:
    """The control: what an operation calls exact, but is not, breaks the answer."""
    source, tied = random_model("llama", 1, tmp_path / "source")
    row = next(row for row in rows if "llama" in row.model_types)
    answer = next(each for each in row.grow if each.promise == "bounded" and each.tied == tied)
    found = outcome("grow", answer, source, tmp_path / "out")
    assert keeps("bounded", found)
    assert not keeps("exact", replace(found, promise="exact"))


def test_groups_of_several_sizes_are_refused() -> None:
    """Also where the config of a class takes any numbers of heads."""
    (falcon,) = (family for family in families().values() if "falcon" in family.model_types)
    model = example(falcon, new_decoder_architecture=True, num_kv_heads=4)
    with pytest.raises(growkit.InputError, match="each of these serves a whole group"):
        change(GrowStep("hypercloning", kv_heads="x3/2"), model, 0)
    assert change(GrowStep("hypercloning", kv_heads="x2"), model, 0).promise == "exact"
