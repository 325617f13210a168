"""Charts as SVG text: from numbers to drawings, without a library, a script or the network.

Every chart is 440 units wide, so that its text stays readable from a phone to a wide screen. Its
``<title>`` and ``<desc>`` say what it shows in words and numbers. Colours are classes of
``chart.css``, which a page includes once and ``standalone`` puts into the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from growkit.report.markup import BEYOND, escape, figure, is_number

WIDTH = 440
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 40, 52
LETTER = 7.6
"""Width of a letter, on average and a little more, to keep labels apart."""

LABEL = 21
"""How far below a plot the labels of its axis stand: clear of the lowest number beside it."""

ZERO_ROOM = 30
"""Height between a logarithmic scale and the line of zeros."""

NARROW = 30
"""Height of a band that would hold little more than its own name."""

MOST_DOTS = 60
"""Points up to which a line shows each of them."""

Number = float | int | None


def line(
    values: Sequence[Number],
    *,
    title: str,
    x_title: str,
    y_title: str,
    names: Sequence[str] | None = None,
    log: bool = False,
    limit: tuple[float, str] | None = None,
    mark: tuple[float, str] | None = None,
    places: Sequence[float] | None = None,
) -> str:
    """A line through values in a row.

    Args:
        values: what is drawn; what is no number leaves a gap with a cross.
        title: what the chart shows.
        x_title: of the row.
        y_title: of the values, with their unit.
        names: of the values; their indices if left out.
        log: whether the axis is logarithmic; zeros then have a line of their own, below a break.
        limit: a value to draw a horizontal line at, and its name.
        mark: an index, possibly between two, to draw a vertical line at, and its name.
        places: where the values stand on the axis, in ascending order; at equal distances if left
            out.
    """
    names = names or [str(index) for index in range(len(values))]
    known = [value for value in values if is_number(value)]
    limits = [limit[0]] if limit and is_number(limit[0]) else []
    frame = _logarithmic([*known, *limits], 280) if log else linear([0, *known, *limits], 280)
    across = _across(places or range(len(values)), frame.right)

    parts = [frame.rows()]
    for index, text, anchor in _apart(names, [x - LEFT for x in across]):
        x = across[index]
        parts.append(f'<path class="axis" d="M{x:.1f} {frame.bottom}v4"/>')
        parts.append(lettering(x, frame.bottom + LABEL, text, anchor))
    if limits and limit:
        y = frame.y(limit[0])
        parts.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{frame.right}"/>')
        below = 15 if y < TOP + 20 else -6
        parts.append(lettering(frame.right, y + below, limit[1], "end", "limit-name"))
    if mark:
        before, share = int(mark[0]), mark[0] % 1
        ends = across[before], across[min(before + 1, len(across) - 1)]
        x = ends[0] + share * (ends[1] - ends[0])
        side, gap = ("end", -6) if x > WIDTH / 2 else ("start", 6)
        parts.append(f'<path class="limit" d="M{x:.1f} {TOP}V{frame.bottom}"/>')
        parts.append(lettering(x + gap, TOP + 12, mark[1], side, "limit-name"))
    points = [
        (x, frame.y(value)) if is_number(value) else None
        for x, value in zip(across, values, strict=True)
    ]
    # No line leads across the break: nothing is known of the way to zero.
    broken = [log and one != other for one, other in pairwise(v == 0 for v in values)]
    parts.append(f'<path class="data" d="{_path(points, [*broken, False])}"/>')
    for index, (name, value, point) in enumerate(zip(names, values, points, strict=True)):
        hint = f"<title>{escape(name)}: {escape(figure(value))}</title>"
        if point and len(values) <= MOST_DOTS:
            x, y = point
            parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3">{hint}</circle>')
        elif not point:
            cross = f"M{across[index] - 4:.1f} {TOP + 2}l8 8m0 -8l-8 8"
            parts.append(f'<path class="lost" d="{cross}">{hint}</path>')
    parts.append(frame.titles(x_title, y_title))
    said = _said(names, values) + [named[1] for named in (limit, mark) if named]
    return drawn(title, said, frame.height, parts)


def _across(places: Sequence[float], right: int) -> list[float]:
    """Where values stand from left to right: the first and the last at the ends of the axis."""
    first, last = (places[0], places[-1]) if len(places) else (0, 0)
    scale = (right - LEFT) / (last - first) if last > first else 0.0
    return [LEFT + scale * (place - first) for place in places]


def residuals(
    pairs: Sequence[Sequence[Number]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    band: tuple[float, str] | None = None,
) -> str:
    """Pairs as points: the first number, and how far the second is above or below it.

    Args:
        pairs: what is drawn.
        title: what the chart shows.
        x_title: of the first numbers.
        y_title: of the differences.
        band: a difference to draw a line at on both sides of zero, and its name.
    """
    known = [(x, y - x) for x, y in pairs if is_number(x) and is_number(y)]
    across = linear([x for x, _ in known], 300)
    reach = [abs(difference) for _, difference in known]
    lines = [band[0]] if band and is_number(band[0]) and band[0] > 0 else []
    up = linear([*reach, *lines], 300, around_zero=True)
    parts = [up.rows(), across.columns()]
    parts.append(f'<path class="axis" d="M{LEFT} {up.y(0):.1f}H{up.right}"/>')
    dots = "".join(f"M{across.x(x):.1f} {up.y(difference):.1f}h0" for x, difference in known)
    parts.append(f'<path class="cloud" d="{dots}"/>')
    if lines and band:
        for sign in (-1, 1):
            parts.append(f'<path class="limit" d="M{LEFT} {up.y(sign * band[0]):.1f}H{up.right}"/>')
        # Lines that lie within the cloud of points have their name above it.
        within = up.y(-band[0]) - up.y(band[0]) < NARROW
        height, name = (TOP, f"dashed: {band[1]}") if within else (up.y(band[0]), band[1])
        parts.append(lettering(up.right, height - 6, name, "end", "limit-name"))
    parts.append(up.titles(x_title, y_title))
    said = [f"{len(known)} points"]
    if known:
        x, difference = max(known, key=lambda point: abs(point[1]))
        said.append(f"largest difference: {difference:.4g} at {x:.4g}")
    if len(known) < len(pairs):
        said.append(f"{len(pairs) - len(known)} are none")
    said += [band[1]] if lines and band else []
    return drawn(title, said, up.height, parts)


@dataclass(frozen=True)
class Bar:
    """A bar, and how far the values reach of which it is the mean."""

    name: str
    value: float
    lowest: float
    highest: float


def bars(rows: Sequence[Bar], *, title: str, x_title: str) -> str:
    """Horizontal bars, each below its name; whiskers show how far the values reach."""
    frame = linear([0, *(row.highest for row in rows)], TOP + BOTTOM + 32 * len(rows), left=14)
    parts = [frame.columns()]
    zero = frame.x(0)
    said = []
    for index, row in enumerate(rows):
        y, value = TOP + 32 * index + 14, figure(row.value)
        room = int((frame.right - frame.left) / LETTER) - len(value) - 2
        spread = row.lowest < row.highest
        reach = f" ({figure(row.lowest)} to {figure(row.highest)})" if spread else ""
        said.append(f"{row.name}: {value}{reach}")
        parts.append(lettering(frame.left + 5, y, shortened(row.name, room), "start", "name"))
        parts.append(lettering(frame.right, y, value, "end", "name"))
        parts.append(
            f'<rect class="bar" x="{zero:.1f}" y="{y + 5}" height="9" '
            f'width="{frame.x(row.value) - zero:.1f}"><title>{escape(said[-1])}</title></rect>'
        )
        if spread:
            ends = f"M{frame.x(row.lowest):.1f} {y + 9.5}H{frame.x(row.highest):.1f}"
            parts.append(f'<path class="whisker" d="{ends}"/>')
    parts.append(f'<path class="axis" d="M{zero:.1f} {TOP}V{frame.bottom}"/>')
    parts.append(frame.titles(x_title))
    return drawn(title, said, frame.height, parts)


def standalone(svg: str) -> str:
    """A chart as a file of its own, in light and dark."""
    style = f"<style>{style_rules()}</style>"
    rooted = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return rooted.replace("</desc>", f"</desc>{style}", 1) + "\n"


def style_rules() -> str:
    """The colours of charts, as CSS."""
    return Path(__file__).with_name("chart.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Frame:
    """A plot inside a drawing, with one scale for both directions.

    Attributes:
        low: value at the low end of the scale, or its exponent of ten.
        high: the same of the high end.
        ticks: where numbers stand, as shares of the scale, and the numbers.
        log: whether the scale is logarithmic.
        zeros: whether zeros have a line of their own at the bottom, where the scale has none.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool
    height: int
    left: int = LEFT
    right: int = WIDTH - RIGHT
    zeros: bool = False

    @property
    def bottom(self) -> int:
        """Where the plot ends."""
        return self.height - BOTTOM

    @property
    def floor(self) -> int:
        """Where the scale begins."""
        return self.bottom - ZERO_ROOM if self.zeros else self.bottom

    def x(self, value: float) -> float:
        """Where a value stands on an axis to the right."""
        return self.left + (self.right - self.left) * self._share(value)

    def y(self, value: float) -> float:
        """Where it stands on an axis upwards."""
        if self.zeros and value <= 0:
            return self.bottom
        return self.floor - (self.floor - TOP) * self._share(value)

    def _share(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def rows(self) -> str:
        """Horizontal lines at the ticks, with their numbers."""
        parts = []
        heights = [(self.floor - (self.floor - TOP) * share, label) for share, label in self.ticks]
        if self.zeros:
            heights.append((self.bottom, "0"))
        for y, label in heights:
            parts.append(f'<path class="grid" d="M{self.left} {y:.1f}H{self.right}"/>')
            parts.append(lettering(self.left - 7, y + 4, label, "end"))
        if self.zeros and self.ticks:
            y = (self.floor + self.bottom) / 2
            parts.append(
                f'<path class="axis" d="M{self.left - 5} {y + 1:.1f}l10 -6m-10 10l10 -6"/>'
            )
        return "".join(parts)

    def columns(self) -> str:
        """Vertical lines at the ticks, with their numbers."""
        parts = []
        for share, label in self.ticks:
            x = self.left + (self.right - self.left) * share
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{self.bottom}"/>')
            half = LETTER * len(label) / 2
            inside = min(max(x, half), WIDTH - half)
            parts.append(lettering(inside, self.bottom + LABEL, label, "middle"))
        return "".join(parts)

    def titles(self, x_title: str, y_title: str = "") -> str:
        """The names of both axes, level so that they can be read."""
        return lettering(self.right, self.height - 10, x_title, "end") + lettering(
            4, 16, y_title, "start"
        )


def _logarithmic(values: Sequence[float], height: int) -> Frame:
    """Whole decades, and a line below for zeros where there are some."""
    exponents = [math.log10(value) for value in values if value > 0]
    low = math.floor(min(exponents, default=0.0))
    high = max(math.ceil(max(exponents, default=0.0)), low + 1)
    stride = math.ceil((high - low) / 6)
    shown = range(high, low - 1, -stride) if exponents else ()
    labels = [(tick, f"{10.0**tick:g}" if abs(tick) < 4 else f"1e{tick}") for tick in shown]
    ticks = [((tick - low) / (high - low), label) for tick, label in labels]
    return Frame(low, high, ticks, True, height, zeros=any(value <= 0 for value in values))


def linear(
    values: Sequence[float], height: int, left: int = LEFT, *, around_zero: bool = False
) -> Frame:
    """From one round number to another, with some between.

    Args:
        values: what must have room.
        height: of the drawing.
        left: where the plot begins.
        around_zero: whether zero stands in the middle.
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    size = max(abs(low), abs(high))
    if size < 1 / BEYOND:  # no scale can be read off zeros
        return Frame(-around_zero, 1.0, [(0.5 * around_zero, "0")], False, height, left)
    if around_zero:
        low, high = -size, size
    elif high - low <= size * 1e-12:  # digits that a float does not have cannot be told apart
        low, high = low - size / 2, high + size / 2
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * 6 >= high - low)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [((n - first) / (last - first), f"{n * step:.6g}") for n in range(first, last + 1)]
    return Frame(first * step, last * step, ticks, False, height, left)


def _apart(names: Sequence[str], places: Sequence[float]) -> list[tuple[int, str, str]]:
    """Indices, labels and anchors: the first, the last and round numbers between, kept apart.

    Args:
        names: of what is drawn.
        places: where that stands, from the left end of the axis.
    """
    last = len(names) - 1

    def anchor(index: int) -> str:
        # What stands left of the axis is free below it.
        if index == 0 and LETTER * len(names[index]) / 2 > LEFT:
            return "start"
        return "end" if index and index == last else "middle"

    def span(index: int) -> tuple[float, float]:
        size = LETTER * len(names[index]) + 8
        start = places[index] - {"start": 0.0, "middle": size / 2, "end": size}[anchor(index)]
        return start, start + size

    def clear(first: int, second: int) -> bool:
        return span(first)[1] <= span(second)[0]

    def number(index: int) -> int:
        return int(names[index]) if names[index].isdecimal() else index

    between: list[int] = []
    for stride in (size * 10**power for power in range(7) for size in (1, 2, 5)):
        between = [index for index in range(1, last) if number(index) % stride == 0]
        if all(clear(*neighbours) for neighbours in pairwise(between)):
            break
    between = [index for index in between if clear(0, index) and clear(index, last)]
    ends = [0, last] if last > 0 and clear(0, last) else [0] if names else []
    return [(i, names[i], anchor(i)) for i in sorted({*ends, *between})]


def _path(points: Sequence[tuple[float, float] | None], broken: Sequence[bool]) -> str:
    """A line through points, which ends where one is missing; a point alone is a dot.

    Args:
        points: what it leads through.
        broken: of each, whether it also ends behind it.
    """
    parts, drawing = [], False
    for point, last in zip(points, broken, strict=False):
        if point:
            parts.append(f"{'L' if drawing else 'M'}{point[0]:.1f} {point[1]:.1f}")
            parts.append("" if drawing else "h0")
        drawing = point is not None and not last
    return "".join(parts)


def _said(names: Sequence[str], values: Sequence[Number]) -> list[str]:
    """What a line shows, in words."""
    known = [(value, name) for name, value in zip(names, values, strict=True) if is_number(value)]
    missing = [name for name, value in zip(names, values, strict=True) if not is_number(value)]
    said = []
    for word, (value, name) in (("smallest", min(known)), ("largest", max(known))) if known else ():
        said.append(f"{word} {figure(value)} at {name}")
    return [*said, f"none at {', '.join(missing)}"] if missing else said


def shortened(name: str, letters: int) -> str:
    """A long name without its middle."""
    half = max(letters // 2 - 1, 3)
    return name if len(name) <= letters else f"{name[:half]}…{name[-half:]}"


def lettering(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    """A text at a place."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def drawn(title: str, said: Sequence[str], height: int, parts: Sequence[str]) -> str:
    """A drawing of its parts, with what it shows in words."""
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}"><title>{escape(title)}</title><desc>{escape("; ".join(said))}.</desc>'
        f"{''.join(parts)}</svg>"
    )
