"""Draws two experiments on the first steps after growing from their committed runs, as SVG.

    python -m benchmarks.figures first-steps RUNS.jsonl OUT.svg
    python -m benchmarks.figures symmetry RUNS.jsonl OUT.svg

Lines are means over the orders of batches, with every order as a thin line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.continual.report import in_a_row
from growkit.report.drawing import Curve, Point, Titles, curves, standalone

Runs = Sequence[Mapping[str, Any]]


def chart(title: str, y_title: str, found: Mapping[str, list[list[Point]]]) -> str:
    """One chart.

    Args:
        title: what it shows.
        y_title: of the axis upwards.
        found: points of every order by the name of the line.
    """
    lines = [Curve(name, each) for name, each in found.items()]
    most = max(y for line in lines for _, y in line.mean)
    return curves(lines, Titles(title, "step", y_title), highest=most)


def first_steps(runs: Runs) -> Iterator[str]:
    """Losses above those of the source, on the same batches.

    Noise is how far the source is from itself, computed in float32 or with disturbed weights.
    """
    for model in dict.fromkeys(run["model"] for run in runs):
        of = [run for run in runs if run["model"] == model and run["order"] >= 0]
        source = {run["order"]: run["losses"] for run in of if run["run"] == "source"}
        found: dict[str, list[list[Point]]] = {}
        for run in of:
            if run["run"] != "source":
                name = {"disturbed": "noise: disturbed", "float32": "noise: float32"}
                pairs = zip(run["losses"], source[run["order"]], strict=True)
                above = [(float(step), a - b) for step, (a, b) in enumerate(pairs, 1)]
                found.setdefault(name.get(run["run"], run["run"]), []).append(above)
        yield chart(model, "loss above the source's", found)


def symmetry(runs: Runs) -> Iterator[str]:
    """How far copies are apart, and their effective rank above the source's."""
    orders = [run["looks"] for run in runs if run["run"] == "source"]
    base = [fmean(look["rank"] for look in looks) for looks in zip(*orders, strict=True)]
    apart: dict[str, list[list[Point]]] = {}
    above: dict[str, list[list[Point]]] = {}
    for run in runs:
        if run["run"] != "source":
            looks = run["looks"]
            apart.setdefault(run["run"], []).append([(x["step"], x["apart"]) for x in looks])
            pairs = zip(looks, base, strict=True)
            above.setdefault(run["run"], []).append([(x["step"], x["rank"] - y) for x, y in pairs])
    yield chart("How far copies are apart", "relative to their outputs", apart)
    yield chart("Effective rank", "above the source's", above)


KINDS = {
    "first-steps": (first_steps, "The first steps after growing, in bfloat16"),
    "symmetry": (symmetry, "How copies of MLP neurons part in the first hundred steps"),
}


def drawn(kind: str, file: Path) -> str:
    """The figure of a kind, from its runs."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    charts, title = KINDS[kind]
    return standalone(in_a_row([*charts([line for line in lines if "run" in line])], title))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("runs", type=Path)
    parser.add_argument("output", type=Path)
    chosen = parser.parse_args()
    chosen.output.write_text(drawn(chosen.kind, chosen.runs), "utf-8")


if __name__ == "__main__":
    main()
