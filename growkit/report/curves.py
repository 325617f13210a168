"""Charts of a probe: several lines in one plot, and differences with their intervals.

Names stand beside their lines and marks below the plot, never over it. Lines also differ by how
they are dashed, for print and for eyes that tell few colours apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from growkit.report.drawing import (
    BOTTOM,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    drawn,
    lettering,
    linear,
    shortened,
)
from growkit.report.markup import escape, figure

MOST_LINES = 8
"""Lines that can be told apart; what comes behind them is in tables."""

PLOT, ROW = 300, 20
"""Height of a plot, and of a line of its key."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A line, and those of which it is the mean.

    Attributes:
        name: what it is called.
        mean: its points, from left to right.
        each: the points of every one.
        style: number of its colour and dashes, from 0.
    """

    name: str
    mean: Sequence[Point]
    each: Sequence[Sequence[Point]]
    style: int


def curves(lines: Sequence[Curve], *, title: str, x_title: str, y_title: str, most: float) -> str:
    """Several lines in one plot.

    Args:
        lines: at most ``MOST_LINES``.
        title: what the chart shows.
        x_title: of the axis to the right.
        y_title: of the axis upwards.
        most: the value up to which the axis upwards may reach; lines beyond it run along its end.
    """
    across = linear([0.0, *(x for line in lines for x, _ in line.mean)], PLOT)
    found = [y for line in lines for points in (line.mean, *line.each) for _, y in points]
    up = linear([min(y, most) for y in found], PLOT)
    parts = [up.rows(), across.columns()]
    for line in lines:
        for points in line.each:
            parts.append(f'<path class="seed line-{line.style}" d="{_led(points, across, up)}"/>')
    for line in lines:
        hint = f"<title>{escape(line.name)}</title>"
        path = _led(line.mean, across, up)
        parts.append(f'<path class="mean line-{line.style}" d="{path}">{hint}</path>')
    parts.append(up.titles(x_title, y_title))
    said = []
    for row, line in enumerate(lines):
        y = PLOT + ROW * row + 8
        parts.append(f'<path class="mean line-{line.style}" d="M{LEFT} {y}h34"/>')
        room = int((WIDTH - LEFT - 42 - RIGHT) / LETTER)
        parts.append(lettering(LEFT + 42, y + 5, shortened(line.name, room), "start", "name"))
        if line.mean:
            said.append(f"{line.name}: {figure(line.mean[-1][1], '.4f')} at the end")
    return drawn(title, said, PLOT + ROW * len(lines) + 8, parts)


@dataclass(frozen=True)
class Interval:
    """A difference, with the interval around it and what it is the mean of."""

    name: str
    mean: float
    low: float
    high: float
    each: Sequence[float]
    noise: bool


def intervals(rows: Sequence[Interval], *, title: str, x_title: str) -> str:
    """Differences on one scale around zero, each below its name; dots are those of every seed."""
    height = TOP + BOTTOM + 36 * len(rows)
    values = [value for row in rows for value in (row.low, row.high, *row.each)]
    frame: Frame = linear(values, height, left=14, around_zero=True)
    zero = frame.x(0)
    parts = [frame.columns(), f'<path class="axis" d="M{zero:.1f} {TOP}V{frame.bottom}"/>']
    said = []
    for index, row in enumerate(rows):
        y = TOP + 36 * index + 14
        value = f"{row.mean:+.4f}{' noise' if row.noise else ''}"
        said.append(f"{row.name}: {value} ({row.low:+.4f} to {row.high:+.4f})")
        room = int((frame.right - frame.left) / LETTER) - len(value) - 2
        parts.append(lettering(frame.left + 5, y, shortened(row.name, room), "start", "name"))
        parts.append(lettering(frame.right, y, value, "end", "name"))
        kind = "noise" if row.noise else "sure"
        reach = f"M{frame.x(row.low):.1f} {y + 11}H{frame.x(row.high):.1f}"
        hint = f"<title>{escape(said[-1])}</title>"
        parts.append(f'<path class="interval {kind}" d="{reach}">{hint}</path>')
        dots = "".join(f"M{frame.x(each):.1f} {y + 11}h0" for each in row.each)
        parts.append(f'<path class="seeds" d="{dots}"/>')
        x = frame.x(row.mean)
        parts.append(f'<path class="middle" d="M{x:.1f} {y + 5}v12"/>')
    parts.append(frame.titles(x_title))
    return drawn(title, said, frame.height, parts)


def _led(points: Sequence[Point], across: Frame, up: Frame) -> str:
    """A line through points."""
    places = [f"{across.x(x):.1f} {up.y(y):.1f}" for x, y in points]
    return f"M{'L'.join(places)}" if places else ""
