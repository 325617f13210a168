"""Charts as SVG: legible in light, in dark and in print, with the legend below the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from benchmarks.continual.wording import counts

WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 240, 64, 66, 70
ROW, VALUES, LETTER = 26, 160, 6.6
STYLE = """
.page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e }
.grid { stroke: #d0d7de; fill: none } .zero { stroke: #59636e; stroke-dasharray: 3 3; fill: none }
.level { fill: #59636e; stroke: #ffffff; stroke-width: 4; paint-order: stroke }
.line { fill: none; stroke-width: 1.8; stroke: currentColor } .mark { fill: currentColor }
.c0 { color: #1f2328 } .c1 { color: #2f6db5 } .c2 { color: #c2410c } .c3 { color: #2d7d4b }
.c4 { color: #8a4b9c } .c5 { color: #a16207 } .noise { color: #59636e }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .soft { fill: #a6b0bb }
.grid { stroke: #3d444d } .zero { stroke: #a6b0bb } .level { fill: #a6b0bb; stroke: #0d1117 }
.c0 { color: #f0f6fc } .c1 { color: #7fb2f0 } .c2 { color: #f2916b } .c3 { color: #86cfa0 }
.c4 { color: #d39be0 } .c5 { color: #e0c060 } .noise { color: #a6b0bb }
}
"""
COLOURS = 6
DOTS = "A dot for each seed, their mean, and its 95 % interval, grey where it holds 0."
SPREAD = "Marks are means over seeds; bars reach from the lowest seed to the highest."
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "5 2", "1 2")
"""Lines differ without colours as well."""


@dataclass(frozen=True)
class Point:
    """A place on a line, with its spread.

    Attributes:
        x: above 0.
        y: the mean.
        low: the lowest of all seeds.
        high: the highest.
    """

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """Lines over a logarithmic axis.

    Attributes:
        title: what it shows.
        x_title: of the horizontal axis.
        lines: points by the name of the line.
        levels: values that are drawn right across, by name.
    """

    title: str
    x_title: str
    lines: Mapping[str, Sequence[Point]]
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Values of one arm, on an axis with others.

    Attributes:
        name: of it.
        values: of the seeds.
        margin: half of the confidence interval; None without one.
        said: what stands beside it.
    """

    name: str
    values: Sequence[float]
    margin: float | None
    said: str


def line_chart(title: str, panels: Sequence[Panel]) -> str:
    """Panels in a row; of what lies far above the others, only the value is shown."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = max(1, len(panels))
    rows = -(-len(names) // columns)
    width = LEFT + columns * (WIDTH + GAP) - GAP + 28
    height = TOP + HEIGHT + 90 + 20 * rows
    parts = _page(title, width, height)
    for number, panel in enumerate(panels):
        parts.append(_panel(panel, LEFT + number * (WIDTH + GAP), names, number))
    for number, name in enumerate(names):
        x, y = LEFT + number // rows * (WIDTH + GAP), TOP + HEIGHT + 66 + 20 * (number % rows)
        parts.append(f'<g class="c{number % COLOURS}">{_dashed(f"M{x} {y - 4}h30", number)}')
        parts.append(f'{_mark(x + 15, y - 4, number)}</g><text class="text" x="{x + 40}" y="{y}">')
        parts.append(f"{escape(name)}</text>")
    parts.append(_text(LEFT, height - 16, SPREAD, "soft", "start"))
    return "\n".join(parts) + "\n</svg>\n"


def dot_chart(title: str, x_title: str, rows: Sequence[Row]) -> str:
    """A row for each difference: a dot for each seed, the mean and its confidence interval.

    Args:
        title: what it shows.
        x_title: of the axis.
        rows: from top to bottom.
    """
    reach = [0.0]
    for row in rows:
        mean = sum(row.values) / len(row.values)
        reach += [*row.values, mean - (row.margin or 0), mean + (row.margin or 0)]
    ticks = nice(min(reach), max(reach))
    low, high = min(*ticks, *reach), max(*ticks, *reach)
    left = 38 + LETTER * max(len(row.name) for row in rows)
    across, height = 420, TOP + ROW * len(rows) + 78
    width = round(left + across + VALUES + 24)

    def at(value: float) -> float:
        return left + across * (value - low) / (high - low)

    parts = _page(title, width, height)
    bottom = TOP + ROW * len(rows)
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{at(tick):.1f} {TOP - 8}V{bottom}"/>')
        parts.append(_text(at(tick), bottom + 18, f"{tick:g}".replace("-", "−"), "soft", "middle"))
    parts.append(f'<path class="zero" d="M{at(0):.1f} {TOP - 8}V{bottom}"/>')
    parts.append(_text(left + across / 2, bottom + 40, x_title, "soft", "middle"))
    parts.append(_text(left + across / 2, bottom + 58, DOTS, "soft", "middle"))
    for number, row in enumerate(rows):
        y = TOP + ROW * (number + 0.5)
        mean = sum(row.values) / len(row.values)
        parts.append(_text(left - 14, y + 4, row.name, "text", "end"))
        parts.append(_text(left + across + 14, y + 4, row.said, "text", "start"))
        sure = row.margin is not None and abs(mean) > row.margin
        parts.append(f'<g class="{"c1" if sure else "noise"}">')
        if row.margin is not None:
            begin, end = at(mean - row.margin), at(mean + row.margin)
            parts.append(f'<path class="line" d="M{begin:.1f} {y:.1f}H{end:.1f}"/>')
        parts.append(f'<path class="line" d="M{at(mean):.1f} {y - 8:.1f}v16"/>')
        parts += [f'<circle class="mark" cx="{at(v):.1f}" cy="{y:.1f}" r="3"/>' for v in row.values]
        parts.append("</g>")
    return "\n".join(parts) + "\n</svg>\n"


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about so many."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power: float = 10 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _page(title: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text" x="24" y="28" font-size="15" font-weight="600">{escape(title)}</text>',
    ]


def _text(x: float, y: float, said: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
    )


def _dashed(path: str, number: int) -> str:
    return f'<path class="line" d="{path}" stroke-dasharray="{DASHES[number % len(DASHES)]}"/>'


def _mark(x: float, y: float, number: int) -> str:
    """A shape of its own for each line."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
        f'<path class="mark" d="M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 4.4:.1f}l4.4 7.4h-8.8z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z"/>',
        f'<path class="mark" d="M{x:.1f} {y + 4.4:.1f}l4.4 -7.4h-8.8z"/>',
        f'<path class="mark" d="M{x - 4.5:.1f} {y - 1.5:.1f}h9v3h-9z"/>',
    )
    return shapes[number % len(shapes)]


def _panel(panel: Panel, left: float, names: Sequence[str], number: int) -> str:
    points = [point for line in panel.lines.values() for point in line]
    shown = [point for line in panel.lines.values() for point in list(line)[1:] or line]
    low = min([each.low for each in points] + [*panel.levels.values()])
    high = max([each.high for each in shown] + [*panel.levels.values()])
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin
    first, last = min(each.x for each in points) / 1.1, max(each.x for each in points) * 1.1

    def across(x: float) -> float:
        return left + WIDTH * math.log(x / first) / math.log(last / first)

    def down(y: float) -> float:
        return TOP + HEIGHT * (high - y) / (high - low)

    parts = [_text(left, TOP - 14, panel.title, "text", "start")]
    for tick in nice(low, high):
        parts.append(f'<path class="grid" d="M{left} {down(tick):.1f}h{WIDTH}"/>')
        parts.append(_text(left - 8, down(tick) + 4, f"{tick:g}", "soft", "end"))
    ticks = _powers(first, last)
    for tick, said in zip(ticks, counts(ticks), strict=True):
        parts.append(f'<path class="grid" d="M{across(tick):.1f} {TOP}v{HEIGHT}"/>')
        parts.append(_text(across(tick), TOP + HEIGHT + 18, said, "soft", "middle"))
    for level in panel.levels.values():
        parts.append(f'<path class="zero" d="M{left} {down(level):.1f}h{WIDTH}"/>')
    parts.append(_text(left + WIDTH / 2, TOP + HEIGHT + 38, panel.x_title, "soft", "middle"))
    parts.append(
        f'<clipPath id="p{number}"><rect x="{left - 6}" y="{TOP}" width="{WIDTH + 12}" '
        f'height="{HEIGHT}"/></clipPath><g clip-path="url(#p{number})">'
    )
    for name, line in panel.lines.items():
        kind = names.index(name)
        path = "M" + "L".join(f"{across(each.x):.1f} {down(each.y):.1f}" for each in line)
        parts.append(f'<g class="c{kind % COLOURS}">{_dashed(path, kind)}')
        for each in line:
            x = across(each.x)
            parts.append(
                f'<path class="line" d="M{x:.1f} {down(each.low):.1f}V{down(each.high):.1f}"/>'
            )
            parts.append(_mark(x, down(each.y), kind))
        parts.append("</g>")
    parts.append("</g>")
    above = [
        (across(each.x), each.y, names.index(name))
        for name, line in panel.lines.items()
        for each in line
        if each.y > high
    ]
    for number, (x, y, kind) in enumerate(above):
        parts.append(
            f'<text class="c{kind % COLOURS}" fill="currentColor" x="{x + 6:.1f}" '
            f'y="{TOP + 14 + 14 * number}">↑ {y:.2f}</text>'
        )
    for name, level in panel.levels.items():
        said = f"{name} {level:.2f}"
        parts.append(_text(left + WIDTH, down(level) - 5, said, "level", "end"))
    return "\n".join(parts)


def _powers(first: float, last: float) -> list[float]:
    """1, 2 and 5 times powers of ten; without 2 and 5 over three decades; any round ones if few."""
    begin, end = math.floor(math.log10(first)), math.ceil(math.log10(last))
    steps = (1, 2, 5) if end - begin <= 3 else (1,)
    found = [step * 10.0**power for power in range(begin, end + 1) for step in steps]
    within = [each for each in found if first <= each <= last]
    return within if len(within) > 1 else nice(first, last)
