"""Leads over training on, by the age of the source, and the age from which on there is one.

The age is the number of tokens for each parameter that the source was trained with. A lead is the
test loss of the source trained on minus that of an arm with as much extra compute, seed by seed.
Between two ages, leads are taken to be linear in the logarithm of the age.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.continual import tables
from benchmarks.continual.analysis import Outcome, interval
from benchmarks.continual.experiment import Experiment
from growkit.report.drawing import LEFT, RIGHT, ROW, TOP, Drawing, Interval, Scale, Titles, linear
from growkit.report.view import figure

Leads = Mapping[float, Mapping[int, float]]
"""Nats per token by age, then by seed."""

AGAIN = 1.0
"""Extra compute of charts and summaries, in multiples of the source's."""

LONG = (1.0, 2.0)
"""Extra compute of the page's tables; the others are in the tables of all runs."""

AHEAD = "ahead from"
"""Heading of the ages from which on a way of growing is ahead."""


def ways(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Names of arms by what they do, then by source; of arms that several sources have."""
    found: dict[str, dict[str, str]] = {}
    for name, arm in experiment.arms.items():
        way, _, source = name.rpartition(", ")
        if source == arm.source:
            found.setdefault(way, {})[source] = name
    return found


def baseline(experiment: Experiment) -> str:
    """The way that others are held against: the source is trained on."""
    return experiment.baseline.rpartition(", ")[0]


def budgets(experiment: Experiment) -> dict[float, float]:
    """Shares of the extra compute by their multiples of the source's."""
    points = experiment.arms[experiment.baseline].points
    return {float(at) * experiment.scale.extra: float(at) for at in points}


@dataclass(frozen=True)
class Crossing:
    """The age at which a way of growing begins to lead over training the source on.

    Attributes:
        sign: ``from`` or ``until``, if the lead begins or ends there; ``always`` or ``never``, if
            some seed leads at every measured age and the others from ``age``, or if none leads at
            the greatest; ``differs`` if seeds differ otherwise.
        age: mean over seeds of the logarithm, as an age; of ``always``, the least age from which
            every seed leads; of ``never``, the greatest measured age.
        low: lower end of the 95 % interval; of ``differs``, the least of any seed.
        high: upper end, likewise.
        seeds: number of seeds.
    """

    sign: str
    age: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        between = f"{self.low:.0f} to {self.high:.0f}"
        reach = f"({between})" if self.seeds > 1 else "(one seed)"
        return {
            "from": f"{self.age:.0f} {reach}",
            "until": f"until {self.age:.0f} {reach}",
            "always": f"{self.age:.0f} or less",
            "never": f"not up to {self.age:.0f}",
            "differs": f"seeds differ, {between}",
        }[self.sign]


@dataclass(frozen=True)
class Way:
    """A way of growing, at one budget.

    Attributes:
        name: what the arms do.
        extra: the budget, in multiples of the source's.
        leads: over the baseline's.
        ages: of all sources that are to be compared.
        seeds: how many are wanted.
        bits: bits per byte for a nat per token.
    """

    name: str
    extra: float
    leads: Leads
    ages: tuple[float, ...]
    seeds: int
    bits: float

    @property
    def shown(self) -> str:
        """The crossing, once there are leads at all ages."""
        return str(self.crossing) if len(self.leads) == len(self.ages) else "unfinished"

    @property
    def crossing(self) -> Crossing | None:
        """None without a seed that has all ages."""
        return crossing(self.leads) if self.leads else None

    def at(self, age: float) -> Interval:
        """The mean lead with its interval."""
        return interval([*self.leads[age].values()], self.name)

    def cell(self, age: float) -> str:
        """A lead in nats per token and, in brackets, bits per byte, with what is missing."""
        if age not in self.leads:
            return "not run"
        found = self.at(age)
        few = "" if len(found.each) == self.seeds else f", {len(found.each)} of {self.seeds} seeds"
        bits = f"({found.mean * self.bits:+.3f})".replace("-", "−")
        return f"{tables.signed(found)} {bits}{few}"


def every(experiment: Experiment, made: Mapping[str, Outcome]) -> Iterator[Way]:
    """All ways of growing at all budgets, of which there are runs.

    Args:
        experiment: with sources of one shape.
        made: outcomes of its sources and arms.
    """
    if not made:
        return
    size, seeds, bits = parameters(experiment, made), len(experiment.seeds), bits_per_nat(made)
    known = {source: experiment.source_tokens(source) / size for source in experiment.sources}
    arms = ways(experiment)
    trained_on = arms.pop(baseline(experiment), {})
    for way, by_source in arms.items():
        for extra, share in budgets(experiment).items():
            found: dict[float, dict[int, float]] = {}
            for source, age in known.items():
                base, grown = made.get(trained_on[source]), made.get(by_source[source])
                if base and grown:
                    losses = base.at(share)
                    own = grown.at(share).items()
                    found[age] = {seed: losses[seed] - loss for seed, loss in own if seed in losses}
            found = {age: lead for age, lead in found.items() if lead}
            yield Way(way, extra, found, tuple(known.values()), seeds, bits)


def parameters(experiment: Experiment, made: Mapping[str, Outcome]) -> int:
    """Parameters of the sources, all of one shape."""
    lines = [line for name in experiment.sources for line in _lines(made, name)]
    return int(lines[0]["parameters"])


def _lines(made: Mapping[str, Outcome], name: str) -> list[Any]:
    return [*made[name].lines.values()] if name in made else []


def bits_per_nat(made: Mapping[str, Outcome]) -> float:
    """Bits per byte of the text for a nat per token.

    Lines without the bytes of the test files have those of the whole text (0.7 % less per token in
    the text of 60 MB).
    """
    text = next(line["text"] for name in made for line in _lines(made, name))
    known, tokens = text.get("test_bytes"), text["tokens"]
    per_token = known / tokens["test"] if known else text["bytes"] / sum(tokens.values())
    return float(1 / (math.log(2) * per_token))


def crossings(found: Leads) -> list[tuple[str, float]]:
    """For every seed that has all ages, where its lead begins or ends.

    Returns:
        ``from`` or ``until``, and the logarithm of the age at which the lead's sign changes for
        the last time; ``always`` and that of the least age; or ``never`` and that of the greatest.
    """
    crossed = []
    seeds = set.intersection(*(set(each) for each in found.values()))
    for seed in sorted(seeds):
        points = [(math.log(age), by_seed[seed]) for age, by_seed in sorted(found.items())]
        leads = points[-1][1] > 0
        sign, at = ("always", points[0][0]) if leads else ("never", points[-1][0])
        for (before, one), (after, other) in pairwise(points):
            if (one > 0) != (other > 0):
                sign = "from" if leads else "until"
                at = before + (after - before) * one / (one - other)
        crossed.append((sign, at))
    return crossed


def crossing(found: Leads) -> Crossing | None:
    """The age from which on there is a lead, with its 95 % interval over seeds."""
    crossed = crossings(found)
    signs, values = [sign for sign, _ in crossed], [value for _, value in crossed]
    if not crossed:
        return None
    if {*signs} == {"from", "always"}:
        least, most = (math.exp(each(values)) for each in (min, max))
        return Crossing("always", most, least, most, len(signs))
    if len({*signs}) > 1:
        bounds = [math.exp(each(values)) for each in (fmean, min, max)]
        return Crossing("differs", *bounds, len(signs))
    mean = interval(values)
    low, high = (mean.low, mean.high) if signs[0] in ("from", "until") else (mean.mean, mean.mean)
    return Crossing(signs[0], *(math.exp(each) for each in (mean.mean, low, high)), len(signs))


def table(experiment: Experiment, made: Mapping[str, Outcome]) -> str:
    """Leads of all ways at all ages and budgets."""
    found = [way for way in every(experiment, made) if way.leads]
    if not found:
        return "No way of growing can be held against training on yet.\n"
    head = ["", "extra compute", *(f"{age:.0f}" for age in found[0].ages), AHEAD]
    rows = [
        [way.name, f"{way.extra:g} ×", *map(way.cell, way.ages), str(way.crossing or "not run")]
        for way in found
    ]
    return (
        f"Lead over “{baseline(experiment)}” at equal extra compute (in multiples of the source's) "
        "in nats per token and, in brackets, bits per byte, by tokens for each parameter of the "
        "source; and the number of these from which on there is a lead, with its 95 % interval "
        "over seeds:\n\n"
    ) + tables.table(head, rows)


def chart(experiment: Experiment, made: Mapping[str, Outcome]) -> str | None:
    """Leads with as much compute as the source's, by age; None without any."""
    found = [way for way in every(experiment, made) if way.leads and way.extra == AGAIN]
    if not found:
        return None
    size = tables.count(parameters(experiment, made))
    titles = Titles(
        f"Lead over training on, {size} parameters",
        "tokens for each parameter of the source",
        f"{size} parameters: lead over training on, nats per token",
    )
    return _drawn(found, titles)


def _drawn(found: Sequence[Way], titles: Titles) -> str:
    """Leads around zero at all ages, with their intervals and a key below the plot."""
    drawing = Drawing(300)
    points = [[(math.log2(age), way.at(age)) for age in way.leads] for way in found]
    ends = [end for each in points for _, lead in each for end in (lead.low, lead.high)]
    up = linear([0.0, *ends], drawing.bottom, TOP)
    places = {math.log2(age): f"{age:.0f}" for age in found[0].ages}
    margin = 0.08 * (max(places) - min(places)) or 1.0
    low, high = min(places) - margin, max(places) + margin
    across = Scale(low, high, [*places.items()], LEFT, RIGHT)
    drawing.rows(up)
    drawing.columns(across)
    drawing.path("axis", f"M{LEFT} {up.at(0):.1f}H{RIGHT}")
    drawing.text(RIGHT, drawing.height + 10, AHEAD, "end")
    for style, (way, leads) in enumerate(zip(found, points, strict=True), 1):
        aside = 5 * (style - (len(found) + 1) / 2)  # so that intervals do not cover each other
        placed = [(across.at(x) + aside, lead) for x, lead in leads]
        for x, lead in placed:
            bar = f"M{x:.1f} {up.at(lead.low):.1f}V{up.at(lead.high):.1f}"
            hint = f"{way.name}: {figure(lead.mean, '+.4f')}"
            drawing.path(f"seed line-{style}", bar, hint)
        kind = f"mean line-{style}"
        drawing.path(kind, "M" + "L".join(f"{x:.1f} {up.at(lead.mean):.1f}" for x, lead in placed))
        cross = way.crossing
        if cross and cross.sign in ("from", "until"):
            x = across.at(math.log2(cross.age)) + aside
            drawing.path(f"dot line-{style}", f"M{x:.1f} {up.at(0):.1f}h0")
        y = drawing.height + ROW * style + 8
        drawing.path(kind, f"M{LEFT} {y}h34")
        drawing.named(LEFT + 42, y + 5, way.name, str(cross or ""))
        drawing.words.append(f"{way.name}: {AHEAD} {cross or ''}")
    return drawing.svg(titles, more=ROW * (len(found) + 1) + 8)
