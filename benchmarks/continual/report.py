"""The page of all experiments, its charts, the tables of all runs, and when growing pays."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from benchmarks.continual import ages, forecast, paying, sections, tables
from benchmarks.continual.analysis import Outcome, differences, judged
from benchmarks.continual.sections import Section
from benchmarks.continual.tables import count
from growkit.report.drawing import Curve, Titles, curves, intervals, standalone

TITLE = "# What growing is worth\n"
TABLES = "# All experiments\n"
SUMMARY = "summary.md"
"""Next to the lines: what they mean, in words."""


def write(lines: Path, page: Path, all_tables: Path) -> None:
    """Write all that is published of the experiments.

    Args:
        lines: folder of result files, and of the summary of the page.
        page: Markdown file to write, with a folder of charts of the same name.
        all_tables: Markdown file to write.
    """
    found = sections.read(lines)
    if not found:
        raise SystemExit(f"there are no results in {lines}; carry an experiment out first")
    charts = page.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    drawings = paying.drawings(found)
    if drawings:
        (charts / paying.CHART).write_text(
            standalone(in_a_row(drawings, paying.TITLE, most=2)), "utf-8"
        )
    summary = lines / SUMMARY
    parts = [TITLE, *paying.answer(found, charts.name)]
    parts += forecast.compared(paying.compared(found), lines)
    parts += paying.literature(found)
    parts += [summary.read_text("utf-8")] if summary.exists() else []
    _save(page, [*parts, *_claims(found)])
    link = os.path.relpath(charts, all_tables.parent)
    _save(all_tables, [TABLES, *(part for each in found for part in _section(each, charts, link))])


def _save(file: Path, parts: Sequence[str]) -> None:
    file.write_text("\n".join(parts).rstrip() + "\n", "utf-8")


def _claims(every: Sequence[Section]) -> Iterator[str]:
    """What appeared, and what did not."""
    found = [each for section in every for each in judged(section.experiment, section.arms)]
    for title, appeared in (("What holds", True), ("What does not hold", False)):
        yield f"## {title}\n"
        if not appeared:
            yield "Noise (intervals contain zero), or, in bold, the opposite:\n"
        yield tables.claims([each for each in found if (each.verdict == "yes") is appeared])


def _section(section: Section, charts: Path, link: str) -> Iterator[str]:
    experiment, shown = section.experiment, section.arms
    yield f"## {experiment.name}, {experiment.scale_name}\n"
    yield f"{experiment.question}\n"
    yield _state(section)
    if not section.runs:
        return
    yield _setting(section)
    if ways := ages.ways(experiment):
        yield ages.table(experiment, section.made)
        for source, name in ways[ages.baseline(experiment)].items():
            arms = {each[source]: shown.get(each[source]) for each in ways.values()}
            done = {arm: outcome for arm, outcome in arms.items() if outcome}
            if name in done:
                yield tables.losses(experiment, done, done[name])
                yield from tables.compute_to(experiment, done, done[name])
        yield tables.rates(experiment, section.made)
        return
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
    parts = []
    if section.missing:
        parts.append(f"**Unfinished:** {section.missing} runs are missing.")
        seeds = len(section.experiment.seeds)
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
    name = f"{experiment.name}-{experiment.scale_name}"
    for number, (title, arms) in enumerate(experiment.charts.items(), 1):
        of = {arm: shown[arm] for arm in arms if arm in shown}
        if not of:
            continue
        made = [_curves(section, of, "extra compute", total=False)]
        if any(line["before_flops"] for arm in of.values() for line in arm.lines.values()):
            made.append(_curves(section, of, "the source's and extra compute", total=True))
        (folder / f"{name}-{number}.svg").write_text(standalone(in_a_row(made, title)), "utf-8")
        yield f"![{title}: test loss by compute]({link}/{name}-{number}.svg)\n"
    rows = []
    for arm, outcome in shown.items():
        found = differences(outcome.at(outcome.last), baseline.at(outcome.last), arm)
        if found and arm != baseline.name:
            rows.append(found)
    if rows:
        title = f"Test loss above that of “{baseline.name}”"
        axis = "nats per token at equal extra compute; left of 0 is better"
        made_of = standalone(intervals(rows, Titles(title, axis)))
        (folder / f"{name}-differences.svg").write_text(made_of, "utf-8")
        yield f"![{title}]({link}/{name}-differences.svg)\n"


def _curves(section: Section, arms: Mapping[str, Outcome], axis: str, *, total: bool) -> str:
    """Test losses where rates have decayed, by compute, with those of the trained sources."""
    lines, tops = [], []
    most = max(
        point["flops"] + line["before_flops"] * total
        for arm in arms.values()
        for line in arm.lines.values()
        for point in line["points"]
    )
    unit, letter = tables.unit_of(most)
    for name, arm in arms.items():
        each = [
            [
                ((point["flops"] + line["before_flops"] * total) / unit, point["test"])
                for point in line["points"]
            ]
            for line in arm.lines.values()
        ]
        tops += [loss for points in each for _, loss in points[1:] or points]
        lines.append(Curve(name, each))
    experiment = section.experiment
    for source in dict.fromkeys(experiment.arms[name].source for name in arms):
        if experiment.sources[source].trained and source in section.made:
            loss = fmean(section.made[source].at(1.0).values())
            level = [(0.0, loss), (most / unit, loss)]
            lines.append(Curve(f"{source}, before", [level]))
            tops.append(loss)
    x_title = f"{axis}, {letter}FLOPs"
    titles = Titles(f"Test loss by {axis}", x_title, "test loss, nats per token")
    return curves(lines, titles, highest=max(tops))


def in_a_row(charts: Sequence[str], title: str, most: int | None = None) -> str:
    """Charts next to each other as one drawing.

    Args:
        charts: drawings.
        title: of the whole.
        most: how many have room in a row; None for all.
    """
    most = most or len(charts)
    sizes = [tuple(map(int, re.findall(r'(?:width|height)="(\d+)"', each)[:2])) for each in charts]
    placed, width, height = "", 0, 0
    for first in range(0, len(charts), most):
        x, row = 0, sizes[first : first + most]
        for chart, size in zip(charts[first : first + most], row, strict=True):
            at = f'x="{x}" y="{height}"' if height else f'x="{x}"'
            placed += chart.replace("<svg ", f"<svg {at} ", 1)
            x += size[0]
        width, height = max(width, x), height + max(size[1] for size in row)
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><title>{escape(title)}</title><desc>{escape(title)}.</desc>'
        f"{placed}</svg>"
    )
