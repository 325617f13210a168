"""Draws what ``first_steps.py`` and ``symmetry.py`` measured, as an SVG in light and dark.

    python benchmarks/figures.py first-steps RUNS.jsonl OUT.svg
    python benchmarks/figures.py symmetry RUNS.jsonl OUT.svg

Lines are means over the orders of batches. They also differ by how they are dashed, for print and
for eyes that tell few colours apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from growkit.report.drawing import linear

WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 200, 56, 62, 76
STYLE = """
.page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e }
.grid { stroke: #d0d7de } .line { fill: none; stroke-width: 1.8 } .noise { fill: #b6bec7 }
.c0 { stroke: #2f6db5 } .c1 { stroke: #2d7d4b } .c2 { stroke: #c2410c } .c3 { stroke: #8a4b9c }
.c4 { stroke: #a16207 } .c5 { stroke: #57606a }
.c1 { stroke-dasharray: 9 3 } .c2 { stroke-dasharray: 2 3 } .c3 { stroke-dasharray: 10 3 2 3 }
.c4 { stroke-dasharray: 5 3 } .c5 { stroke-dasharray: 12 3 2 3 2 3 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .soft { fill: #a6b0bb }
.grid { stroke: #3d444d } .noise { fill: #57606a }
.c0 { stroke: #7fb2f0 } .c1 { stroke: #86cfa0 } .c2 { stroke: #f2916b } .c3 { stroke: #d39be0 }
.c4 { stroke: #e0c060 } .c5 { stroke: #b6bec7 }
}
"""


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: what it shows.
        x_title: of the horizontal axis.
        lines: points by the name of the line.
        noise: half the height of the band around zero, if there is one.
    """

    title: str
    x_title: str
    lines: dict[str, list[tuple[float, float]]]
    noise: float = 0.0


def first_steps(runs: list[dict[str, Any]]) -> list[Panel]:
    """How far losses are above those of the source, on the same batches."""
    panels = []
    for model in dict.fromkeys(run["model"] for run in runs):
        of = [run for run in runs if run["model"] == model and run["order"] >= 0]
        source = {run["order"]: run["losses"] for run in of if run["run"] == "source"}
        above: dict[str, list[list[float]]] = {}
        for run in of:
            pairs = zip(run["losses"], source[run["order"]], strict=True)
            above.setdefault(run["run"], []).append([a - b for a, b in pairs])
        noise = max(abs(each) for run in above["disturbed"] + above["float32"] for each in run)
        lines = {
            name: [(step, fmean(each)) for step, each in enumerate(zip(*found, strict=True), 1)]
            for name, found in above.items()
            if name not in ("source", "disturbed", "float32")
        }
        panels.append(Panel(f"{model}: loss above the source's", "step", lines, noise))
    return panels


def symmetry(runs: list[dict[str, Any]]) -> list[Panel]:
    """How far copies are apart, and their effective rank above the source's."""
    found: dict[str, list[list[dict[str, float]]]] = {}
    for run in runs:
        found.setdefault(run["run"], []).append(run["looks"])
    rank = [fmean(look["rank"] for look in looks) for looks in zip(*found["source"], strict=True)]
    apart, above = {}, {}
    for name, orders in found.items():
        looks = list(zip(*orders, strict=True))
        steps = [each[0]["step"] for each in looks]
        if name != "source":
            apart[name] = [
                (step, fmean(look["apart"] for look in each))
                for step, each in zip(steps, looks, strict=True)
            ]
            above[name] = [
                (step, fmean(look["rank"] for look in each) - base)
                for step, each, base in zip(steps, looks, rank, strict=True)
            ]
    return [
        Panel("how far copies are apart", "step", apart),
        Panel("effective rank above the source's", "step", above),
    ]


def drawn(panels: Sequence[Panel], title: str) -> str:
    """All panels in a row, with one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    rows = -(-len(names) // len(panels))
    noise = any(panel.noise for panel in panels)
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 24
    height = TOP + HEIGHT + 70 + 20 * (rows + noise)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text" x="24" y="28" font-size="15" font-weight="600">{title}</text>',
    ]
    for number, panel in enumerate(panels):
        parts.append(_panel(panel, LEFT + number * (WIDTH + GAP), names))
    below = TOP + HEIGHT + 64
    for number, name in enumerate(names):
        x, y = LEFT + number // rows * (WIDTH + GAP), below + 20 * (number % rows)
        parts.append(f'<path class="line c{number}" d="M{x} {y - 4}h24"/>')
        parts.append(f'<text class="text" x="{x + 32}" y="{y}">{name}</text>')
    if noise:
        y = below + 20 * rows
        parts.append(f'<rect class="noise" x="{LEFT}" y="{y - 9}" width="24" height="8"/>')
        said = "noise: the largest difference of the source, in float32 or disturbed, from itself"
        parts.append(f'<text class="text" x="{LEFT + 32}" y="{y}">{said}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def _panel(panel: Panel, left: float, names: Sequence[str]) -> str:
    values = [y for points in panel.lines.values() for _, y in points]
    up = linear([0.0, *values, panel.noise, -panel.noise])
    across = linear([0.0, *(x for points in panel.lines.values() for x, _ in points)])

    def right(x: float) -> float:
        return left + WIDTH * (x - across.low) / (across.high - across.low)

    def down(y: float) -> float:
        return TOP + HEIGHT * (up.high - y) / (up.high - up.low)

    parts = [f'<text class="text" x="{left}" y="{TOP - 12}">{panel.title}</text>']
    if panel.noise:
        begin, end = down(panel.noise), down(-panel.noise)
        parts.append(
            f'<rect class="noise" x="{left}" y="{begin:.1f}" width="{WIDTH}" '
            f'height="{end - begin:.1f}"/>'
        )
    for share, label in up.ticks:
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{WIDTH}"/>')
        parts.append(_number(left - 6, y + 4, label, "end"))
    for share, label in across.ticks:
        parts.append(_number(left + WIDTH * share, TOP + HEIGHT + 18, label, "middle"))
    parts.append(_number(left + WIDTH, TOP + HEIGHT + 36, panel.x_title, "end"))
    for name, points in panel.lines.items():
        path = "L".join(f"{right(x):.1f} {down(y):.1f}" for x, y in points)
        parts.append(f'<path class="line c{names.index(name)}" d="M{path}"/>')
    return "\n".join(parts)


def _number(x: float, y: float, text: str, anchor: str) -> str:
    """What stands at an axis."""
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


KINDS = {
    "first-steps": (first_steps, "The first steps after growing, in bfloat16"),
    "symmetry": (symmetry, "How copies of MLP neurons part in the first hundred steps"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("runs", type=Path)
    parser.add_argument("output", type=Path)
    chosen = parser.parse_args()
    lines = [json.loads(line) for line in chosen.runs.read_text("utf-8").splitlines()]
    panels, title = KINDS[chosen.kind]
    made = drawn(panels([line for line in lines if "run" in line]), title)
    chosen.output.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
