"""Charts as SVG text, drawn from numbers without a library, a script or the network.

Every chart is 440 units wide, so that its text stays readable from a phone to a wide screen. Its
``<title>`` and ``<desc>`` describe it in words and numbers. Colours are classes of ``chart.css``,
which a page includes once. Names of lines are next to the plot, never over it; lines also differ by
their dashes, for print and for colour-blind readers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as escape_markup
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from growkit.base.errors import plain
from growkit.report.view import BEYOND, figure, is_finite

WIDTH = 440
LEFT, RIGHT, TOP, BOTTOM = 66, WIDTH - 18, 40, 52
"""Left and right ends of the plot, its top, and the room below it."""

LETTER = 7.6
"""Width of a letter, on average and a little more, to keep labels apart."""

LABEL = 21
"""Distance of an axis label from the plot: clear of the lowest number of the other axis."""

NARROW = 30
"""Height of a band that has no room for its own name."""

MAX_DOTS = 60
"""Largest number of points at which a line shows each point."""

MAX_LINES = 8
"""Limit for distinguishable lines in one plot."""

ROW = 20
"""Height of a line of a key."""

Number = float | int | None
Point = tuple[float, float]


class Titles(NamedTuple):
    """The title of a chart, and the names of its axes with their units."""

    chart: str
    x: str
    y: str = ""


def escape(text: Any) -> str:
    """Escape any text for HTML and XML, attributes included; nothing in it can reorder the page."""
    return escape_markup(plain(str(text), keep="\n\t"))


@dataclass(frozen=True)
class Scale:
    """Positions of values along one direction of a drawing.

    Attributes:
        low: value at ``start``; the exponent of ten on a logarithmic scale.
        high: value at ``end``, likewise.
        ticks: values to print, each with its text.
        start: position of ``low``.
        end: position of ``high``.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The position of a value; values outside the scale are placed at its ends."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return self.start + (self.end - self.start) * share


def linear(
    values: Sequence[float], start: float = 0.0, end: float = 1.0, *, around_zero: bool = False
) -> Scale:
    """Make a linear scale between round numbers, with round ticks.

    Args:
        values: values that the scale must cover.
        start: position of the low end.
        end: position of the high end.
        around_zero: whether zero is in the middle.
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    size = max(abs(low), abs(high))
    if size < 1 / BEYOND:  # zeros define no scale
        return Scale(-around_zero, 1.0, [(0.0, "0")], start, end)
    if around_zero:
        low, high = -size, size
    elif high - low <= size * 1e-12:  # floats have no digits to tell these apart
        low, high = low - size / 2, high + size / 2
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power * 6 >= high - low)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [(n * step, f"{n * step:.6g}") for n in range(first, last + 1)]
    return Scale(first * step, last * step, ticks, start, end)


def _logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Make a logarithmic scale of whole decades, above a line for zeros if there are any."""
    exponents = [math.log10(value) for value in values if value > 0]
    low = math.floor(min(exponents, default=0.0))
    high = max(math.ceil(max(exponents, default=0.0)), low + 1)
    stride = math.ceil((high - low) / 6)
    zeros = len(exponents) < len(values)
    floor = low - stride if zeros else low
    ticks = [
        (10.0**tick, f"{10.0**tick:g}" if abs(tick) < 4 else f"1e{tick}")
        for tick in (range(high, low - 1, -stride) if exponents else ())
    ]
    return Scale(floor, high, [*ticks, *[(0.0, "0")] * zeros], start, end, log=True)


class Drawing:
    """A chart in progress; ``words`` describe it."""

    def __init__(self, height: int) -> None:
        self.height, self.bottom = height, height - BOTTOM
        self.parts: list[str] = []
        self.words: list[str] = []

    def path(self, kind: str, path: str, hint: str = "") -> None:
        """Add a path of a class of ``chart.css``."""
        end = f"><title>{escape(hint)}</title></path>" if hint else "/>"
        self.parts.append(f'<path class="{kind}" d="{path}"{end}')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Add a text."""
        named = f' class="{kind}"' if kind else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f"<text{named} {place}>{escape(text)}</text>")

    def named(self, x: float, y: float, name: str, value: str = "") -> None:
        """Add a row's name, shortened in the middle if it has no room, and its value."""
        room = int((RIGHT - x) / LETTER) - len(value) - 2
        half = max(room // 2 - 1, 3)
        shown = name if len(name) <= room else f"{name[:half]}…{name[-half:]}"
        self.text(x, y, shown, kind="name")
        if value:
            self.text(RIGHT, y, value, "end", "name")

    def rows(self, scale: Scale) -> None:
        """Add horizontal lines at the ticks, with their numbers."""
        for value, label in scale.ticks:
            self.path("grid", f"M{LEFT} {scale.at(value):.1f}H{RIGHT}")
            self.text(LEFT - 7, scale.at(value) + 4, label, "end")

    def columns(self, scale: Scale) -> None:
        """Add vertical lines at the ticks, with their numbers."""
        for value, label in scale.ticks:
            x = scale.at(value)
            self.path("grid", f"M{x:.1f} {TOP}V{self.bottom}")
            self.text(_inside(x, label), self.bottom + LABEL, label, "middle")

    def limit(self, y: float, name: str, y_name: float) -> None:
        """Add a horizontal line with its name."""
        self.path("limit", f"M{LEFT} {y:.1f}H{RIGHT}")
        self.text(RIGHT, y_name, name, "end", "limit-name")

    def svg(self, titles: Titles, more: int = 0) -> str:
        """Finish the chart; ``more`` is the height of the drawing below the plot."""
        self.text(RIGHT, self.height - 10, titles.x, "end")
        self.text(4, 16, titles.y)
        height = self.height + more
        return (
            f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}"><title>{escape(titles.chart)}</title>'
            f"<desc>{escape('; '.join(self.words))}.</desc>{''.join(self.parts)}</svg>"
        )


def _inside(x: float, label: str) -> float:
    """Move the middle of a label so that it stays inside the drawing."""
    half = LETTER * len(label) / 2
    return min(max(x, half), WIDTH - half)


def line(
    values: Sequence[Number],
    titles: Titles,
    *,
    names: Sequence[str] | None = None,
    log: bool = False,
    limit: tuple[float, str] | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """Draw a line through a series of values, at equal distances.

    Args:
        values: the values; a missing number leaves a gap with a cross.
        titles: titles of the chart and its axes.
        names: names of the values; their indices if left out.
        log: whether the axis is logarithmic; zeros then have a line of their own, below a gap.
        limit: a value for a horizontal line, and its name.
        mark: an index, also between two values, for a vertical line, and its name.
    """
    names = names or [str(index) for index in range(len(values))]
    limit = limit if limit and is_finite(limit[0]) else None
    chart = Drawing(280)
    known = [*filter(is_finite, values), *([limit[0]] if limit else [])]
    up = _logarithmic(known, chart.bottom, TOP) if log else linear([0, *known], chart.bottom, TOP)
    across = Scale(0, max(len(values) - 1, 1), [], LEFT, RIGHT)
    xs = [across.at(index) for index in range(len(values))]
    chart.rows(up)
    # Labels do not touch, even if the last is moved inside the drawing.
    room = LETTER * max(map(len, names), default=0) + WIDTH - RIGHT + 8
    for index in range(0, len(xs), math.ceil(room * across.high / (RIGHT - LEFT))):
        chart.path("axis", f"M{xs[index]:.1f} {chart.bottom}v4")
        chart.text(_inside(xs[index], names[index]), chart.bottom + LABEL, names[index], "middle")

    path, previous, drawn, missing = "", None, [], []
    for x, name, value in zip(xs, names, values, strict=True):
        hint = f"{name}: {figure(value)}"
        if not is_finite(value):
            chart.path("lost", f"M{x - 4:.1f} {TOP + 2}l8 8m0 -8l-8 8", hint)
            missing.append(name)
            previous = None
            continue
        # No line leads to zero on a logarithmic scale, where it would cross unknown decades.
        joined = previous is not None and not (log and (value == 0) != (previous == 0))
        path += f"{'L' if joined else 'M'}{x:.1f} {up.at(value):.1f}{'' if joined else 'h0'}"
        if len(values) <= MAX_DOTS:
            chart.path("dot", f"M{x:.1f} {up.at(value):.1f}h0", hint)
        drawn.append((value, name))
        previous = value
    chart.path("data", path)
    if limit:
        y = up.at(limit[0])
        chart.limit(y, limit[1], y - 6 if y >= TOP + 20 else y + 15)
    if mark:
        x = across.at(mark[0])
        side, gap = ("end", -6) if x > WIDTH / 2 else ("start", 6)
        chart.path("limit", f"M{x:.1f} {TOP}V{chart.bottom}")
        chart.text(x + gap, TOP + 12, mark[1], side, "limit-name")
    for word, best in (("smallest", min), ("largest", max)) if drawn else ():
        value, name = best(drawn)
        chart.words.append(f"{word} {figure(value)} at {name}")
    chart.words += [f"none at {', '.join(missing)}"] if missing else []
    chart.words += [marker[1] for marker in (limit, mark) if marker]
    return chart.svg(titles)


def residuals(
    pairs: Sequence[Sequence[Number]], titles: Titles, band: tuple[float, str] | None = None
) -> str:
    """Draw pairs as points: the first number, and the difference of the second from it.

    Args:
        pairs: the pairs.
        titles: titles of the chart and its axes.
        band: a difference for a line on both sides of zero, and its name.
    """
    known = [(x, y - x) for x, y in pairs if is_finite(x) and is_finite(y)]
    band = band if band and is_finite(band[0]) and band[0] > 0 else None
    chart = Drawing(300)
    across = linear([x for x, _ in known], LEFT, RIGHT)
    reach = [*(abs(y) for _, y in known), *([band[0]] if band else [])]
    up = linear(reach, chart.bottom, TOP, around_zero=True)
    chart.rows(up)
    chart.columns(across)
    chart.path("axis", f"M{LEFT} {up.at(0):.1f}H{RIGHT}")
    chart.path("cloud", "".join(f"M{across.at(x):.1f} {up.at(y):.1f}h0" for x, y in known))
    chart.words.append(f"{len(known)} points")
    if known:
        x, difference = max(known, key=lambda point: abs(point[1]))
        chart.words.append(f"largest difference: {difference:.4g} at {x:.4g}")
    if band:
        above, below = up.at(band[0]), up.at(-band[0])
        chart.path("limit", f"M{LEFT} {below:.1f}H{RIGHT}")
        # If lines are within the cloud of points, their name is above it.
        chart.limit(above, f"dashed: {band[1]}", (TOP if below - above < NARROW else above) - 6)
        chart.words.append(band[1])
    return chart.svg(titles)


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    Attributes:
        name: name of the averaged quantity.
        mean: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        each: the averaged values, drawn as dots.
        noise: whether the mean may be noise; it is then drawn in grey.
    """

    name: str
    mean: float
    low: float
    high: float
    each: Sequence[float] = ()
    noise: bool = False


def intervals(rows: Sequence[Interval], titles: Titles, *, around_zero: bool = True) -> str:
    """Draw means with their intervals on one scale, each below its name.

    Args:
        rows: the means.
        titles: titles of the chart and its axes.
        around_zero: whether zero is in the middle of the scale; it starts at zero otherwise.
    """
    chart, left = Drawing(TOP + BOTTOM + 36 * len(rows)), 14
    values = [0.0, *(value for row in rows for value in (row.low, row.high, *row.each))]
    scale = linear(values, left, RIGHT, around_zero=around_zero)
    chart.columns(scale)
    chart.path("axis", f"M{scale.at(0):.1f} {TOP}V{chart.bottom}")
    form = "+.4f" if around_zero else ".3g"
    for index, row in enumerate(rows):
        y = TOP + 36 * index + 14
        label = f"{figure(row.mean, form)}{' noise' if row.noise else ''}"
        reach = f" ({figure(row.low, form)} to {figure(row.high, form)})"
        chart.words.append(f"{row.name}: {label}{reach if row.low < row.high else ''}")
        chart.named(left + 5, y, row.name, label)
        kind = f"interval {'noise' if row.noise else 'sure'}"
        ends = f"M{scale.at(row.low):.1f} {y + 11}H{scale.at(row.high):.1f}"
        chart.path(kind, ends, chart.words[-1])
        chart.path("seeds", "".join(f"M{scale.at(value):.1f} {y + 11}h0" for value in row.each))
        chart.path("middle", f"M{scale.at(row.mean):.1f} {y + 5}v12")
    return chart.svg(titles)


@dataclass(frozen=True)
class Curve:
    """The mean of some lines, together with the lines if there are several.

    Attributes:
        name: name of the curve.
        each: the points of every line, from left to right.
    """

    name: str
    each: Sequence[Sequence[Point]]

    @property
    def mean(self) -> list[Point]:
        """The points of the mean."""
        together = zip(*self.each, strict=True)
        return [(points[0][0], fmean(y for _, y in points)) for points in together]


def curves(lines: Sequence[Curve], titles: Titles, *, highest: float = math.inf) -> str:
    """Draw several curves in one plot, with a key below it.

    Args:
        lines: at most ``MAX_LINES`` curves.
        titles: titles of the chart and its axes.
        highest: largest value of the vertical axis; lines above it run along its end.
    """
    chart = Drawing(300)
    points = [point for line in lines for curve in line.each for point in curve]
    across = linear([0.0, *(x for x, _ in points)], LEFT, RIGHT)
    up = linear([min(y, highest) for _, y in points], chart.bottom, TOP)
    chart.rows(up)
    chart.columns(across)

    def draw(kind: str, points: Sequence[Point], hint: str = "") -> None:
        places = [f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in points]
        chart.path(kind, f"M{'L'.join(places)}" if places else "", hint)

    for style, line in enumerate(lines):
        for seed_line in line.each if len(line.each) > 1 else ():
            draw(f"seed line-{style}", seed_line)
    for style, line in enumerate(lines):
        kind, mean = f"mean line-{style}", line.mean
        draw(kind, mean, line.name)
        y = chart.height + ROW * style + 8
        chart.path(kind, f"M{LEFT} {y}h34")
        chart.named(LEFT + 42, y + 5, line.name)
        if mean:
            chart.words.append(f"{line.name}: {figure(mean[-1][1], '.4f')} at the end")
    return chart.svg(titles, more=ROW * len(lines) + 8)


def standalone(svg: str) -> str:
    """Turn a chart into a standalone file, with light and dark colours."""
    style = f"<style>{style_rules()}</style>"
    rooted = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return rooted.replace("</desc>", f"</desc>{style}", 1) + "\n"


def style_rules() -> str:
    """The colours of charts as CSS."""
    return Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
