"""When growing pays: the answer on the page and in README, and the rule that commands read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.continual import ages, papers, tables
from benchmarks.continual.analysis import Outcome, interval, reached
from benchmarks.continual.sections import Section

CHART = "when.svg"
TITLE = "Lead over training on, by tokens for each parameter of the source"
BEGIN, END = "<!-- when growing pays -->\n", "<!-- end -->\n"
"""Around the part of README."""

KNOWN = 1e12 / 1e9
"""Tokens for each parameter of the model that README's readers have in mind."""


def compared(found: Sequence[Section]) -> list[Section]:
    """Experiments with sources of several ages, from small models to large ones."""
    of_ages = [each for each in found if ages.ways(each.experiment) and each.made]
    return sorted(of_ages, key=lambda each: ages.parameters(each.experiment, each.made))


def from_scratch(found: Sequence[Section]) -> list[Section]:
    """Experiments in which models from scratch set the goals."""
    return [each for each in found if each.experiment.goals and each.made]


def _ways(section: Section) -> list[ages.Way]:
    every = ages.every(section.experiment, section.made)
    return [way for way in every if way.extra == ages.AGAIN and way.leads]


def rule(found: Sequence[Section]) -> str:
    """When growing paid, as ``growkit.planning.when`` reads it."""
    ways: dict[str, Any] = {}
    least = []
    for section in compared(found):
        experiment = section.experiment
        arms = ages.ways(experiment)
        least += ages.budgets(experiment)
        for way in _ways(section):
            (arm, *_) = arms[way.name].values()
            known = ways.setdefault(way.name, {"steps": experiment.arms[arm].steps, "sizes": []})
            cross = way.crossing
            size = {
                "parameters": ages.parameters(experiment, section.made),
                "ages": [round(age, 1) for age in way.leads],
                "complete": section.complete,
                "crossing": None,
            }
            if cross:
                whole = asdict(cross)
                size["crossing"] = {
                    key: round(value, 1) if isinstance(value, float) else value
                    for key, value in whole.items()
                }
            known["sizes"].append(size)
    rules = {"extra": ages.AGAIN, "least": min(least, default=0.0), "ways": ways}
    return json.dumps(rules, indent=2) + "\n"


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
            "*Models were trained to several ages (tokens for each parameter), then grown and "
            "trained on, or only trained on, with as much compute again. A dot marks the age from "
            "which on growing is ahead. Bars are 95 % intervals over seeds. Larger models may "
            "differ.*\n"
        )
        for section in sections:
            yield _leads(section)
    for section in from_scratch(found):
        yield _shares(section)


def _unfinished(section: Section) -> str:
    return f"**Unfinished:** {section.missing} runs are missing. " if not section.complete else ""


def _leads(section: Section) -> str:
    found = _ways(section)
    rows = [[way.name, *way.cells()] for way in found]
    head = ["", *(f"{age:.0f}" for age in found[0].ages), "ahead from"]
    size = tables.count(ages.parameters(section.experiment, section.made))
    return (
        f"{_unfinished(section)}Lead over training on in nats per token, by age, in models of "
        f"{size} parameters:\n\n{tables.table(head, rows)}"
    )


def _shares(section: Section) -> str:
    """The compute to the losses of models from scratch."""
    rows = []
    goals = [section.arms[goal] for goal in section.experiment.goals if goal in section.arms]
    for name, arm in section.arms.items():
        goal = goal_of(name, goals)
        if goal and name != goal.name:
            rows.append([name, share_of(arm, goal)])
    if not rows:
        return f"{_unfinished(section)}No grown model is done in {section.experiment.name} yet.\n"
    return (
        f"{_unfinished(section)}Compute to the final loss of a model from scratch at "
        f"{section.experiment.scale_name}, the source's included, as a share of that model's:\n\n"
        + tables.table(["", "share of the compute"], rows)
    )


def goal_of(name: str, goals: Sequence[Outcome]) -> Outcome | None:
    """The model from scratch of an arm's shape, which begins its name."""
    return next((goal for goal in goals if goal.name.split()[0] == name.split()[0]), None)


def share_of(arm: Outcome, goal: Outcome) -> str:
    """The share of the goal's compute at which an arm has its loss, with the interval."""
    found = reached(arm, goal, goal.last)
    signs = {each.sign for each in found}
    if not found or ">" in signs:
        return "not reached" if signs == {">"} else "not reached by all seeds"
    mean = interval([-each.saved_total for each in found])
    if "<" in signs:
        return f"less than {math.exp(max(mean.each)):.2f}"
    ends = (f"{math.exp(each):.2f}" for each in (mean.mean, mean.low, mean.high))
    return "{} ({} to {})".format(*ends)


def literature(found: Sequence[Section]) -> Iterator[str]:
    """What papers claim about when growing pays, held against the experiments."""
    rows = papers.rows(compared(found), from_scratch(found))
    yield "## What papers say\n"
    yield tables.table(["claim", "measured here", "does it appear?"], rows)


def into(readme: Path, found: Sequence[Section], folder: str) -> None:
    """Replace the part of README between its marks, if an experiment is complete.

    Args:
        readme: a Markdown file with the marks.
        found: all experiments.
        folder: with the chart, as README names it.
    """
    done = [section for section in compared(found) if section.complete]
    if done:
        before, _, rest = readme.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        part = "\n".join(_brief(done, from_scratch(found), folder))
        readme.write_text(f"{before}{BEGIN}{part}\n{END}{after}", "utf-8")


def _brief(done: Sequence[Section], scratch: Sequence[Section], folder: str) -> Iterator[str]:
    sizes = [tables.count(ages.parameters(each.experiment, each.made)) for each in done]
    yield f"![{TITLE}]({folder}/{CHART})\n"
    yield (
        "Measured on [small models](docs/results.md); larger ones may differ. With as much compute "
        "again as a model's training took, growing was ahead of training on from these ages "
        "(tokens for each parameter) on:\n"
    )
    by_way: dict[str, list[str]] = {}
    for section in done:
        for way in _ways(section):
            by_way.setdefault(way.name, []).append(str(way.crossing))
    rows = [[name, *cells] for name, cells in by_way.items()]
    yield tables.table(["", *(f"{size} parameters" for size in sizes)], rows)
    section, oldest = done[-1], 0.0
    ahead = []
    for way in _ways(section):
        oldest = max(way.ages)
        if not way.at(oldest).noise and way.at(oldest).mean > 0:
            ahead.append(way.name)
    yield (
        f"A model of 1B parameters that has seen 1T tokens has an age of {KNOWN:,.0f}. Neither "
        f"that size nor that age was measured; at {oldest:.0f}, the greatest that was, "
        f"{', '.join(ahead) + ' led' if ahead else 'nothing led'}.\n"
    )
    for each in scratch:
        if each.complete:
            goals = [each.arms[goal] for goal in each.experiment.goals]
            sooner = [
                name
                for name, arm in each.arms.items()
                if (goal := goal_of(name, goals))
                and name != goal.name
                and (found := papers.saved(arm, goal))
                and found.low > 0
            ]
            yield (
                f"If the small model's compute counts too ({each.experiment.scale_name}), "
                + (
                    f"these were sooner at the loss of a new model: {'; '.join(sooner)}.\n"
                    if sooner
                    else "no grown model was sooner at the loss of a new one: do not train a small "
                    "model only to grow it.\n"
                )
            )
