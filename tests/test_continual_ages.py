"""When growing pays: what is made of lines with a known crossing, of all of them and of some."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.continual import ages, papers, paying, sections
from benchmarks.continual.__main__ import LINES, ROOT
from benchmarks.continual.campaign import next_rates
from benchmarks.continual.experiment import Experiment, load, settings_of
from benchmarks.continual.report import write
from growkit.planning import when
from growkit.planning.when import Crossing
from growkit.probing.lines import append_line

Loss = Callable[[str, int, Any], float]
"""Of an arm, a seed and a point."""

CROSSED = 40.0
SEEDS = {0: 0.9, 1: 1.0, 2: 1 / 0.9}
"""Factors of the crossing."""

TEXT = {
    "text": "made up",
    "sha256": "0" * 64,
    "files": 3,
    "bytes": 4_000_000,
    "test_bytes": 250_000,
    "vocabulary": 512,
    "tokens": {"train": 1_800_000, "validation": 100_000, "test": 100_000},
}
SIZES = {"17k": 17568, "53k": 53216}
MACHINE = {
    "processor": "a",
    "device": "cpu",
    "threads": 1,
    "torch": "2",
    "growkit": "0",
    "commit": "a",
}


def lines(experiment: Experiment, loss: Loss) -> Iterator[dict[str, Any]]:
    """All lines of an experiment that was carried out; the best rate is the middle one."""
    rates = experiment.learning_rates
    best = next_rates(rates, {})[0]
    others = next_rates(rates, {best: 0.0})
    for name in (*experiment.sources, *experiment.arms):
        arm = experiment.arms.get(name)
        for rate, seed in [(r, s) for r in others for s in (0, 1)] + [(best, s) for s in SEEDS]:
            points = []
            for at in arm.points if arm else (1.0,):
                flops = float(at) * 2 * experiment.source_tokens(arm.source if arm else name)
                test = loss(name, seed, at)
                validation = test + (rate != best)
                point = {"at": at, "tokens": flops, "flops": flops}
                points.append({**point, "validation": validation, "test": test})
            before = experiment.source_tokens(arm.source) if arm and arm.weights == "source" else 0
            yield {
                "experiment": experiment.name,
                "scale": experiment.scale_name,
                "run": name,
                "seed": seed,
                "rate": rate,
                "settings": settings_of(experiment, name, str(TEXT["sha256"])),
                "parameters": SIZES[experiment.scale_name],
                "flops_per_token": 1,
                "before_flops": before,
                "epochs": 0.1,
                "curve": [],
                "points": points,
                "seconds": 1.0,
                "text": TEXT,
                "machine": MACHINE,
            } | ({"source_rate": best} if before else {})


def crossed_at(age: float) -> Loss:
    """Leads of twice the width rise by 0.1 with every doubling, those of the others are −0.05."""

    def loss(name: str, seed: int, at: Any) -> float:
        way, _, source = name.rpartition(", ")
        if not way:
            return 5.0
        trained_on = 4.0 - 0.1 * math.log2(float(source)) - 0.1 * float(at)
        if way == "twice as wide":
            exact = {"16": 278528, "64": 1114112, "256": 4456448}[source] / 17568
            return trained_on - 0.1 * math.log2(exact / (age * SEEDS[seed]))
        return trained_on + 0.05 * (way != "trained on")

    return loss


def compared_to_scratch(name: str, seed: int, at: Any) -> float:
    """What has grown is at the loss from scratch with three quarters of its compute."""
    kind, _, when_grown = name.partition(" ")
    if kind not in ("wide", "deep"):
        return 5.0
    if when_grown == "from scratch":
        return 4.0 - float(at) / 2  # 3 at the end, which is a share of 2
    share = int(re.findall(r"\d+", when_grown)[0]) / 100
    extra = float(at) * (1 if share == 0.25 else 2 if share == 0.5 else 3.2) / 2
    spent = share + extra
    return 4.0 - spent / 0.75 + 0.001 * seed * (share != 0.25)


def folder_of(place: Path, *made: dict[str, Any]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for line in made:
        append_line(place / f"{line['experiment']}.jsonl", line)
    return place


def reported(place: Path, lines_in: Path) -> dict[str, str]:
    """What the report makes, by its name."""
    (place / "docs").mkdir(parents=True)
    readme = place / "README.md"
    readme.write_text(f"before\n{paying.BEGIN}as it was\n{paying.END}after\n", "utf-8")
    made = {"page": place / "docs" / "results.md", "tables": place / "tables.md"}
    made |= {"rule": place / "when.json", "readme": readme}
    write(lines_in, made["page"], made["tables"], made["rule"], readme)
    made["chart"] = place / "docs" / "results" / paying.CHART
    return {name: file.read_text("utf-8") for name, file in made.items() if file.exists()}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("known")
    made = [*lines(load("when", "17k"), crossed_at(CROSSED))]
    made += lines(load("scratch", "17k"), compared_to_scratch)
    return reported(place / "out", folder_of(place / "lines", *made))


def test_a_known_crossing_is_found(known: dict[str, str]) -> None:
    """In the rule, the page, the tables, README and the chart; others have none."""
    rule = json.loads(known["rule"])
    (size,) = rule["ways"]["twice as wide"]["sizes"]
    found = Crossing(**size["crossing"])
    assert size["complete"]
    assert found.sign == "from"
    assert found.age == pytest.approx(CROSSED, abs=0.1)
    assert found.low < 0.9 * CROSSED < CROSSED / 0.9 < found.high
    others = {name: way["sizes"][0]["crossing"] for name, way in rule["ways"].items()}
    assert {each["sign"] for name, each in others.items() if name != "twice as wide"} == {"never"}
    (page, *_) = (line for line in known["page"].splitlines() if "twice as wide" in line)
    assert page.endswith(f"| {found} |")
    lead = 0.1 * math.log2(278528 / 17568 / CROSSED)
    assert f"| −{-lead:.3f} ±" in page
    bits = lead / math.log(2) / 2.5
    assert f"(−{-bits:.3f})" in known["tables"]
    assert f"| twice as wide | {found} |" in known["readme"]
    assert "| four experts | not up to 254 |" in known["readme"]
    assert "at 254, the greatest that was, twice as wide led" in known["readme"]
    assert known["readme"].startswith("before\n")
    assert known["readme"].endswith("after\n")
    drawn = ElementTree.fromstring(known["chart"])
    assert str(found) in "".join(drawn.itertext())
    assert known["chart"].count('class="dot ') == 1


def test_without_a_crossing_there_is_none(tmp_path: Path) -> None:
    """The control: the same lines with a crossing beyond all ages, or before them."""
    for age, sign, said in ((1e4, "never", "not up to 254"), (1.0, "always", "16 or less")):
        place = tmp_path / sign
        made = lines(load("when", "17k"), crossed_at(age))
        found = reported(place / "out", folder_of(place / "lines", *made))
        way = json.loads(found["rule"])["ways"]["twice as wide"]["sizes"][0]
        assert way["crossing"]["sign"] == sign
        assert f"| twice as wide | {said} |" in found["readme"]
        assert 'class="dot ' not in found["chart"]
        assert ("nothing led" in found["readme"]) is (sign == "never")


def test_parts_of_an_experiment_are_reported_as_such(tmp_path: Path) -> None:
    """After every arm, and in the middle of one: nothing is claimed of what is missing."""
    every = [*lines(load("when", "17k"), crossed_at(CROSSED))]
    names = [*dict.fromkeys(line["run"] for line in every)]
    for number in (1, 3, 4, 7, 8, len(names) - 1):
        some = [line for line in every if line["run"] in names[:number]]
        for cut in (0, 1):  # without the last seed
            place = tmp_path / f"{number}-{cut}"
            found = reported(place / "out", folder_of(place / "l", *some[: len(some) - cut]))
            assert "Unfinished" in found["tables"]
            assert "as it was" in found["readme"]
            wide = json.loads(found["rule"])["ways"].get("twice as wide")
            assert (wide is not None) is (number > 6)
            if wide:
                assert not wide["sizes"][0]["complete"]
                assert "not run" in found["page"] or number > 8
    assert "2 of 3 seeds" in found["page"]


def test_compute_to_the_loss_from_scratch(known: dict[str, str]) -> None:
    assert "| wide after 25 % | 0.75 (0.75 to 0.75) |" in known["page"]


def test_claims_of_papers(known: dict[str, str]) -> None:
    """Each has its line, and its verdict follows from the lines."""
    part = known["page"].partition("## What papers say")[2]
    rows = {
        each.number: next(r for r in part.splitlines() if each.number in r)
        for each in papers.CLAIMS
    }
    assert rows["2511.04981"].endswith("| does not appear |")
    assert rows["2602.02472"].endswith("| appears |")
    assert "with 0.75 of the compute" in rows["2602.02472"]
    assert rows["2510.08008"].endswith("| appears |")
    sections_of = sections.read(LINES)
    without = [*papers.rows([], paying.from_scratch(sections_of)[:0])]
    assert {row[-1] for row in without} == {"not run"}


def test_the_age_from_which_on_a_growth_leads() -> None:
    """By hand: halfway between 16 and 64 in the logarithm, before all ages, and after them."""
    crossed = ages.crossings({16.0: {0: -0.1, 1: 0.1, 2: -0.3}, 64.0: {0: 0.1, 1: 0.2, 2: -0.1}})
    assert [sign for sign, _ in crossed] == ["from", "always", "never"]
    assert [math.exp(at) for _, at in crossed] == pytest.approx([32, 16, 64])
    several = {16.0: {0: 0.1}, 64.0: {0: -0.1}, 256.0: {0: 0.1}}
    assert math.exp(ages.crossings(several)[0][1]) == pytest.approx(128)
    ends = {16.0: {0: -0.1}, 64.0: {0: 0.1}, 256.0: {0: -0.1}}
    assert ages.crossings(ends) == [("until", pytest.approx(math.log(128)))]
    both = {16.0: {0: -0.1, 1: -0.2}, 64.0: {0: 0.1, 1: 0.2}}
    assert str(ages.crossing(both)) == "32 (32 to 32)"
    assert str(ages.crossing({16.0: {0: -0.1}, 64.0: {0: 0.1}})) == "32 (one seed)"
    differs = ages.crossing({16.0: {0: -0.1, 1: 0.2}, 64.0: {0: 0.1, 1: 0.2}})
    assert str(differs) == "seeds differ, 16 to 32"
    assert ages.crossing({16.0: {0: 0.1}, 64.0: {1: 0.1}}) is None


def test_the_published_rule_is_that_of_the_published_lines() -> None:
    assert when.FILE.read_text("utf-8") == paying.rule(sections.read(LINES))
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count(paying.BEGIN) == readme.count(paying.END) == 1
