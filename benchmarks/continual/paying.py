"""When growing pays: the answer on the page of results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchmarks.continual import ages, papers, tables
from benchmarks.continual.analysis import Outcome
from benchmarks.continual.sections import Section
from growkit.report.drawing import Interval

CHART = "when.svg"
TITLE = "Lead over training on, by tokens for each parameter of the source"
COMPARED, SCRATCH = "when", "scratch"
"""Experiments with sources of several ages, and with all compute counted."""

GROWN = re.compile(r"(.+) after (\d+ %)(.*)")
"""An arm of that experiment: what was grown, after which share of the compute, and how."""

OTHER = "6k-cpp"
"""The scale of another kind of text."""


def compared(found: Sequence[Section]) -> list[Section]:
    """Experiments with sources of several ages, from small models to large ones."""
    of_ages = [each for each in found if ages.ways(each.experiment) and each.made]
    return sorted(of_ages, key=lambda each: ages.parameters(each.experiment, each.made))


def from_scratch(found: Sequence[Section]) -> list[Section]:
    """Experiments that count all compute, from small models to large ones."""
    made = [each for each in found if each.experiment.name == SCRATCH and each.made]
    return sorted(made, key=lambda each: each.experiment.scale.source_tokens)


def _ways(section: Section, extra: float = ages.AGAIN) -> list[ages.Way]:
    every = ages.every(section.experiment, section.made)
    return [way for way in every if way.extra == extra and way.leads]


def drawings(found: Sequence[Section]) -> list[str]:
    """Leads by age, a panel for each size."""
    every = (ages.chart(each.experiment, each.made) for each in compared(found))
    return [drawing for drawing in every if drawing]


def answer(found: Sequence[Section], folder: str) -> Iterator[str]:
    """The first part of the page.

    Args:
        found: all experiments.
        folder: with the chart, as the page names it.
    """
    sections = [section for section in compared(found) if _ways(section)]
    if sections:
        yield f"## When growing pays\n\n![{TITLE}]({folder}/{CHART})\n"
        yield (
            "*With as much compute again. Dots: ages (tokens for each parameter) from which "
            "growing leads. Bars: 95 % intervals.*\n"
        )
        yield _unfinished(sections) + _crossings(sections)
    scratch = [section for section in from_scratch(found) if _timings(section)]
    if scratch:
        yield _unfinished(scratch) + _shares(scratch)


def _unfinished(sections: Sequence[Section]) -> str:
    text = ""
    for section in sections:
        if section.missing:
            text += f"**Unfinished:** {section.missing} runs or more at {_size(section)}. "
        if edges := [name for name, each in section.made.items() if each.at_edge]:
            text += f"At the edge of the rates that were tried: {'; '.join(edges)}. "
    return text


def _size(section: Section) -> str:
    return section.experiment.scale_name


def _crossings(sections: Sequence[Section]) -> str:
    """The ages from which on growing is ahead, by way and size."""
    by_way: dict[str, dict[str, str]] = {}
    for section in sections:
        for way in (way for least in ages.LONG for way in _ways(section, least)):
            name = f"{way.name}, {way.extra:g} ×"
            by_way.setdefault(name, {})[_size(section)] = way.shown
    sizes = [_size(section) for section in sections]
    rows = [[name, *(each.get(size, "") for size in sizes)] for name, each in by_way.items()]
    text = "Ages from which growing was ahead, by extra compute (in sources) and parameters"
    text += f" ({OTHER}: C++ headers):\n\n" if OTHER in sizes else ":\n\n"
    return text + tables.table(["", *sizes], rows)


def _shares(sections: Sequence[Section]) -> str:
    """The least compute to the losses of models from scratch, by way and size."""
    by_way: dict[str, dict[str, str]] = {}
    for section in sections:
        for way, found in _timings(section).items():
            after, best = max(found.items(), key=lambda each: each[1].mean)
            shown = papers.share(best)
            known = f"{shown}, after {after}" if shown != papers.NEVER else shown
            by_way.setdefault(way, {})[_size(section)] = known
    sizes = [_size(section) for section in sections]
    rows = [[name, *(each.get(size, "not run") for size in sizes)] for name, each in by_way.items()]
    return (
        "Least compute to the loss from scratch, as its share, the source's included:\n\n"
        + tables.table(["", *sizes], rows)
    )


def _timings(section: Section) -> dict[str, dict[str, Interval]]:
    """Compute saved by what was grown, and by the share of the compute after which it was."""
    found: dict[str, dict[str, Interval]] = {}
    for name, arm in section.arms.items():
        goal, grown = goal_of(name, section), GROWN.fullmatch(name)
        if goal and grown and (saved := papers.saved(arm, goal)):
            found.setdefault(grown[1] + grown[3], {})[grown[2]] = saved
    return found


def goal_of(name: str, section: Section) -> Outcome | None:
    """The model from scratch of an arm's shape, which begins its name."""
    goals = [section.arms[goal] for goal in section.experiment.goals if goal in section.arms]
    return next((goal for goal in goals if goal.name.split()[0] == name.split()[0]), None)


def literature(found: Sequence[Section]) -> Iterator[str]:
    """What papers claim about when growing pays, held against the experiments."""
    by_age, scratch = compared(found), from_scratch(found)
    rows = [*papers.rows(by_age, scratch)]
    if any(measured for _, measured, _ in rows):
        yield "## What papers say\n"
        yield tables.table(["claim", "measured here", "does it appear?"], rows)
