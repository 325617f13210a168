"""The page of all experiments: a summary, and what the lines of their runs come to."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.continual import results, tables
from benchmarks.continual.analysis import Judged, Outcome, differences, judged, outcomes
from benchmarks.continual.campaign import shared
from benchmarks.continual.charts import Panel, Point, Row, dot_chart, line_chart
from benchmarks.continual.experiment import Experiment, load, names, settings_of
from benchmarks.continual.results import Line
from benchmarks.continual.wording import count, signed

TITLE = "# What growing is worth\n"
TABLES = "# All experiments\n"
SUMMARY = "summary.md"
"""Beside the lines: what they mean, in words."""


@dataclass(frozen=True)
class Section:
    """An experiment at a scale.

    Attributes:
        experiment: which.
        runs: lines of it.
        left_out: how many lines come from other settings.
        made: outcomes of its sources and arms.
    """

    experiment: Experiment
    runs: Sequence[Line]
    left_out: int
    made: Mapping[str, Outcome]

    @property
    def title(self) -> str:
        """Its heading."""
        return f"{self.experiment.name}, {self.experiment.scale_name}"

    @property
    def file_name(self) -> str:
        """What its charts are called."""
        return f"{self.experiment.name}-{self.experiment.scale_name}"

    @property
    def arms(self) -> dict[str, Outcome]:
        """Outcomes without those of sources."""
        return {name: self.made[name] for name in self.experiment.arms if name in self.made}


def write(lines: Path, page: Path, all_tables: Path) -> None:
    """Write the page, a folder of charts of the same name, and the tables of all experiments.

    Args:
        lines: folder of result files, and of the summary that leads the page.
        page: Markdown file to write.
        all_tables: Markdown file to write.
    """
    sections = [each for name in names() for each in _sections(name, lines)]
    if not sections:
        raise SystemExit(f"there are no results in {lines}; carry an experiment out first")
    charts = page.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    summary = lines / SUMMARY
    parts = [TITLE, *([summary.read_text("utf-8")] if summary.exists() else [])]
    _save(page, [*parts, *_claims(sections, charts)])
    link = os.path.relpath(charts, all_tables.parent)
    _save(
        all_tables, [TABLES, *(part for each in sections for part in _section(each, charts, link))]
    )


def _save(file: Path, parts: Sequence[str]) -> None:
    file.write_text("\n".join(parts).rstrip() + "\n", "utf-8")


def _sections(name: str, folder: Path) -> Iterator[Section]:
    lines = results.read(folder / f"{name}.jsonl")
    for scale in dict.fromkeys(line["scale"] for line in lines):
        experiment = load(name, scale)
        known = {*experiment.sources, *experiment.arms}
        own: dict[tuple[str, int, float], Line] = {}
        others: dict[tuple[str, int, float], Line] = {}
        for line in results.read_all(folder):
            same = line["run"] in known and line["settings"] == settings_of(
                experiment, line["run"], line["text"]["sha256"]
            )
            if same:
                to = own if (line["experiment"], line["scale"]) == (name, scale) else others
                to[line["run"], line["seed"], line["rate"]] = line
        fit = shared(experiment, own, others)
        left_out = sum(line["scale"] == scale for line in lines) - len(own)
        yield Section(experiment, [*fit.values()], left_out, outcomes(experiment, fit))


def _claims(sections: Sequence[Section], charts: Path) -> Iterator[str]:
    """What appeared, and what did not."""
    found = [each for section in sections for each in judged(section.experiment, section.arms)]
    drawn = [_row(each) for each in found if each.found and each.of == "test"]
    if drawn:
        title = "Published claims, and what appeared"
        said = "difference of the test loss, nats per token; left of 0 is as claimed"
        (charts / "claims.svg").write_text(dot_chart(title, said, drawn), "utf-8")
        yield f"![{title}]({charts.name}/claims.svg)\n"
    for title, appeared in (("What holds", True), ("What does not hold", False)):
        yield f"## {title}\n"
        yield tables.claims([each for each in found if (each.verdict == "yes") is appeared])


def _row(claim: Judged) -> Row:
    assert claim.found
    name = re.sub(r" \(.*\)", "", claim.says)
    return Row(name, claim.found.values, claim.found.margin, claim.verdict)


def _section(section: Section, charts: Path, link: str) -> Iterator[str]:
    experiment, shown = section.experiment, section.arms
    yield f"## {section.title}\n"
    yield f"{experiment.question}\n"
    yield _state(section)
    if not section.runs:
        return
    yield _setting(section)
    baseline = shown.get(experiment.baseline)
    if baseline is None:
        yield "The baseline is not done yet, so nothing is compared.\n"
        return
    yield from _charts(section, baseline, charts, link)
    yield tables.losses(experiment, shown, baseline)
    for goal in experiment.goals or (experiment.baseline,):
        if goal in shown:
            yield from tables.compute_to(experiment, shown, shown[goal])
    yield from tables.measures(shown)
    yield tables.rates(experiment, section.made)


def _state(section: Section) -> str:
    experiment = section.experiment
    trained = [name for name, each in experiment.sources.items() if each.trained]
    each = len(experiment.learning_rates) + len(experiment.seeds) - 1
    wanted, done = each * (len(trained) + len(experiment.arms)), len(section.runs)
    parts = []
    if done < wanted:
        parts.append(f"**Unfinished:** {done} of {wanted} runs are done.")
        seeds = len(experiment.seeds)
        if some := [name for name, each in section.made.items() if len(each.lines) < seeds]:
            parts.append(f"Fewer seeds than the others: {', '.join(some)}.")
    if section.left_out:
        parts.append(f"{section.left_out} runs of other settings are left out.")
    return " ".join(parts) + "\n" if parts else ""


def _setting(section: Section) -> str:
    experiment, lines = section.experiment, section.runs
    scale, text, own = experiment.scale, lines[0]["text"], experiment.name
    machines = Counter(
        f"{each['device'] if each['device'] != 'cpu' else each['processor']}, "
        f"{each['threads']} thread{'s' * (each['threads'] != 1)}, torch {each['torch']}, "
        f"growkit {each['growkit']} at {each['commit'] or 'no commit'}"
        for each in (line["machine"] for line in lines)
    )
    hours = sum(line["seconds"] for line in lines) / 3600
    sizes: dict[int, list[str]] = {}
    for line in {line["run"]: line for line in lines}.values():
        sizes.setdefault(line["parameters"], []).append(f"“{line['run']}”")
    said = [
        f"- Text: {text['text']}, {text['bytes'] / 1e6:.1f} MB in {text['files']:,} files (sha256 "
        f"{text['sha256'][:16]}…), {count(text['tokens']['train'])} tokens of a BPE of "
        f"{text['vocabulary']:,}; read at most {max(line['epochs'] for line in lines):.2g} times.",
        f"- Parameters: {'; '.join(f'{count(n)}: ' + ', '.join(of) for n, of in sizes.items())}.",
        f"- Budgets: a source gets {count(scale.source_tokens)} tokens, an arm {scale.extra:g} "
        f"times its FLOPs. {scale.batch} windows of {scale.context} tokens a step, AdamW with "
        f"betas {scale.betas[0]:g} and {scale.betas[1]:g}, decay {scale.weight_decay:g} of "
        f"matrices, no clipping, {scale.dtype}.",
        f"- Seeds: {', '.join(map(str, experiment.seeds))}.",
    ]
    said += [f"- {number} runs on {name}." for name, number in machines.items()]
    elsewhere = Counter(line["experiment"] for line in lines if line["experiment"] != own)
    said += [
        f"- {number} of these runs are those of *{name}*." for name, number in elsewhere.items()
    ]
    return "\n".join([*said, f"- {hours:.1f} hours of one process in all.\n"])


def _charts(section: Section, baseline: Outcome, folder: Path, link: str) -> Iterator[str]:
    experiment, shown = section.experiment, section.arms
    for number, (title, arms) in enumerate(experiment.charts.items(), 1):
        of = {arm: shown[arm] for arm in arms if arm in shown}
        if not of:
            continue
        level = _level(section, of)
        panels = [_panel(of, level, "extra compute, FLOPs", False)]
        if any(curve.before for arm in of.values() for curve in arm.curves.values()):
            panels.append(_panel(of, level, "the source's and extra compute, FLOPs", True))
        file = folder / f"{section.file_name}-{number}.svg"
        file.write_text(line_chart(title, panels), "utf-8")
        yield f"![{title}: test loss by compute]({link}/{file.name})\n"
    rows = []
    for arm, outcome in shown.items():
        found = differences(outcome.at(outcome.last), baseline.at(outcome.last))
        if found and arm != baseline.name:
            rows.append(Row(arm, found.values, found.margin, signed(found)))
    if rows:
        title = f"Test loss above that of “{baseline.name}”"
        file = folder / f"{section.file_name}-differences.svg"
        said = "nats per token at equal extra compute; left of 0 is better"
        file.write_text(dot_chart(title, said, rows), "utf-8")
        yield f"![{title}]({link}/{file.name})\n"


def _level(section: Section, arms: Mapping[str, Outcome]) -> dict[str, float]:
    """Losses of the trained sources of arms, where their rates have decayed."""
    experiment = section.experiment
    used = {experiment.arms[name].source for name in arms}
    return {
        name: fmean(outcome.at(1.0).values())
        for name, outcome in section.made.items()
        if name in used and experiment.sources[name].trained
    }


def _panel(
    arms: Mapping[str, Outcome], level: Mapping[str, float], x_title: str, total: bool
) -> Panel:
    lines: dict[str, Any] = {}
    for name, outcome in arms.items():
        curves = list(outcome.curves.values())
        points = []
        for number in range(len(curves[0].at)):
            values = [curve.test[number] for curve in curves]
            x = curves[0].flops[number] + (curves[0].before if total else 0)
            points.append(Point(x, fmean(values), min(values), max(values)))
        lines[name] = points
    return Panel("test loss, nats per token", x_title, lines, level)
