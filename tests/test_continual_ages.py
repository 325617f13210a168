"""When growing pays: what is made of lines with a known crossing, of all of them and of some."""

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.continual import ages, forecast, papers, paying, sections
from benchmarks.continual.campaign import next_rates
from benchmarks.continual.experiment import Experiment, load, settings_of
from benchmarks.continual.report import write
from growkit.base.errors import InputError
from growkit.extras.probing.json_lines import append_line
from tests.conftest import listed

Loss = Callable[[str, int, Any], float]
"""Of an arm, a seed and a point."""

CROSSED = 40.0
SEEDS = {0: 0.9, 1: 1.0, 2: 1 / 0.9}
"""Factors of the crossing."""

MADE_UP = listed("continual", "of runs")
"""What lines say of the text, the numbers of parameters and the machine."""


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
                "settings": settings_of(experiment, name, MADE_UP["text"]["sha256"]),
                "parameters": MADE_UP["parameters"][experiment.scale_name],
                "flops_per_token": 1,
                "before_flops": before,
                "epochs": 0.1,
                "curve": [],
                "points": points,
                "seconds": 1.0,
                "text": MADE_UP["text"],
                "machine": MADE_UP["machine"],
            } | ({"source_rate": best} if before else {})


def crossed_at(age: float, *, every: bool = False) -> Loss:
    """Leads of twice the width, or all, rise by 0.1 with every doubling; others are −0.05."""

    def loss(name: str, seed: int, at: Any) -> float:
        way, _, source = name.rpartition(", ")
        if not way:
            return 5.0
        trained_on = 4.0 - 0.1 * math.log2(float(source)) - 0.1 * float(at)
        if way == "twice as wide" or (every and way != "trained on"):
            exact = {"16": 278528, "64": 1114112, "256": 4456448}[source] / 17568
            return trained_on - 0.1 * math.log2(exact / (age * SEEDS[seed]))
        return trained_on + 0.05 * (way != "trained on")

    return loss


def compared_to_scratch(name: str, seed: int, at: Any, share: float = 0.75) -> float:
    """What has grown is at the loss from scratch with a share of its compute."""
    kind, _, when_grown = name.partition(" ")
    if kind not in ("wide", "deep"):
        return 5.0
    if when_grown == "from scratch":
        return 4.0 - float(at) / 2  # 3 at the end, which is a share of 2
    before = int(re.findall(r"\d+", when_grown)[0]) / 100
    spent = before + float(at) * {0.25: 0.5, 0.5: 1, 0.8: 1.6}[before]
    return 4.0 - spent / share + 0.001 * seed * (before != 0.25)


def folder_of(place: Path, *made: dict[str, Any]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for line in made:
        append_line(place / f"{line['experiment']}.jsonl", line)
    return place


def reported(place: Path, lines_in: Path) -> dict[str, str]:
    """What the report makes, by its name."""
    (place / "docs").mkdir(parents=True)
    made = {"page": place / "docs" / "results.md", "tables": place / "tables.md"}
    write(lines_in, made["page"], made["tables"])
    made["chart"] = place / "docs" / "results" / paying.CHART
    return {name: file.read_text("utf-8") for name, file in made.items() if file.exists()}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("known")
    made = [*lines(load("when", "17k"), crossed_at(CROSSED))]
    made += lines(load("scratch", "17k"), compared_to_scratch)
    return reported(place / "out", folder_of(place / "lines", *made))


def test_a_known_crossing_is_found(known: dict[str, str]) -> None:
    """In the page, the tables and the chart; others have none."""
    shown = re.search(r"\| twice as wide, 1 × \| ((\d+) \((\d+) to (\d+)\)) \|", known["page"])
    assert shown
    crossing, (age, low, high) = shown[1], map(int, shown.groups()[1:])
    assert age == CROSSED
    assert low < 0.9 * CROSSED < CROSSED / 0.9 < high
    assert known["page"].count(" 1 × | not up to 254 |") == 3
    lead = 0.1 * math.log2(278528 / 17568 / CROSSED)
    bits = lead / math.log(2) / 2.5
    row = next(line for line in known["tables"].splitlines() if "| twice as wide | 1 ×" in line)
    assert row.startswith(f"| twice as wide | 1 × | −{-lead:.3f} ± ")
    assert f"(−{-bits:.3f})" in row
    assert row.endswith(f"| {crossing} |")
    drawn = ElementTree.fromstring(known["chart"])
    assert crossing in "".join(drawn.itertext())
    assert known["chart"].count('class="dot ') == 1


@pytest.mark.sampled(0)
def test_a_size_is_predicted_from_two_smaller_ones(tmp_path: Path) -> None:
    """The crossing moves by a constant factor with every size; control: then it does not."""
    two = tmp_path / "two"
    for size, age in (("6k", 40.0), ("6k-cpp", 1.0), ("17k", 50.0)):
        folder_of(two, *lines(load("when", size), crossed_at(age)))
    tokens = [load("when", size).scale.source_tokens for size in ("6k", "17k", "53k")]
    further = math.log(tokens[2] / tokens[1]) / math.log(tokens[1] / tokens[0])
    predicted = 50.0 * (50.0 / 40.0) ** further
    made = forecast.predict(sections.read(two), load("when", "53k"), two)
    assert made.name == "when-53k.predicted.json"
    for age, holds in ((predicted, True), (40.0, False)):
        place = tmp_path / f"{holds}"
        shutil.copytree(two, place / "lines")
        # Made-up leads of all sizes depend on the tokens of 17k.
        folder_of(place / "lines", *lines(load("when", "53k"), crossed_at(age)))
        page = reported(place / "out", place / "lines")["page"]
        row = page.partition("Predicted from the two")[2].partition("| 53k, twice as wide ")
        cells = [cell.split()[0].lstrip("+") for cell in row[2].split("|")[1:5]]
        ahead, measured, *leads = map(float, cells)
        assert ahead == round(predicted)
        assert (measured == pytest.approx(ahead, rel=0.03)) is holds
        assert (leads[1] == pytest.approx(leads[0], abs=0.005)) is holds
        with pytest.raises(InputError, match="53k is measured already"):
            forecast.predict(sections.read(place / "lines"), load("when", "53k"), place)
    one = folder_of(tmp_path / "one", *lines(load("when", "17k"), crossed_at(CROSSED)))
    with pytest.raises(InputError, match="needs two complete smaller sizes"):
        forecast.predict(sections.read(one), load("when", "53k"), one)


def claimed(found: dict[str, str]) -> dict[str, str]:
    """Rows of papers by their number."""
    part = found["page"].partition("## What papers say")[2].splitlines()
    return {each.number: next(row for row in part if each.number in row) for each in papers.CLAIMS}


def test_claims_of_papers(known: dict[str, str], tmp_path: Path) -> None:
    """Each has its line, and its verdict follows from the lines; controls: opposites, nothing."""
    rows = claimed(known)
    assert "| wide, new moments | 0.75 (0.75 to 0.75), after 25 % |" in known["page"]
    lead = [(0.25 + at / 2) / 0.75 - at / 2 for at in (0.5, 1.5)]
    assert f"width −{lead[1] - lead[0]:.3f} ± 0.000" in rows["2605.13405"]
    assert "deep after 25 % (identity) 0.75 (0.75 to 0.75) |" in rows["2511.04981"]
    verdicts = {number: row.split("|")[-2].strip() for number, row in rows.items()}
    no, yes = "does not appear", "appears"
    assert [*verdicts.values()] == [no, no, yes, no, yes]

    def falling(name: str, seed: int, at: Any) -> float:
        """Slower after older sources, which end behind."""
        source = float(name.rpartition(", ")[2])
        return (4.0 + seed / 100) * float(at) ** -(0.1 - source / 4096)

    def shrinking(name: str, seed: int, at: Any) -> float:
        """Leads over scratch shrink, and one layer takes less than the first point, half."""
        if name.startswith("deep after"):
            return compared_to_scratch(name, seed, at, share=0.3)
        return 4.0 if "after" in name else 5.0 - float(at) / 3 + seed / 100

    made = [*lines(load("when", "17k"), falling), *lines(load("scratch", "17k"), shrinking)]
    other = claimed(reported(tmp_path / "out", folder_of(tmp_path / "lines", *made)))
    assert other["2510.06548"].endswith(f"| {yes} |")
    assert other["2510.08008"].endswith(f"| {no} |")
    assert other["2605.13405"].endswith("| appears for width only |")
    assert "less than 0.33 |" in other["2511.04981"]
    assert other["2511.04981"].endswith(f"| {yes} |")
    assert {row[-1] for row in papers.rows([], [])} == {"not run"}


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
    some = ages.crossing({16.0: {0: -0.1, 1: 0.2}, 64.0: {0: 0.1, 1: 0.2}})
    assert str(some) == "32 or less"
    differs = ages.crossing({16.0: {0: -0.1, 1: -0.2}, 64.0: {0: 0.1, 1: -0.1}})
    assert str(differs) == "seeds differ, 32 to 64"
    assert ages.crossing({16.0: {0: 0.1}, 64.0: {1: 0.1}}) is None
