"""Tables and charts of all experiments, from the lines of their runs and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.continual import results
from benchmarks.continual.analysis import (
    Curve,
    Outcome,
    Spread,
    differences,
    outcomes,
    reached,
)
from benchmarks.continual.charts import Panel, Point, Row, dot_chart, line_chart
from benchmarks.continual.experiment import Experiment, load, names, settings_of
from benchmarks.continual.results import Line

HEAD = """# What growing is worth

What `python -m benchmarks.continual report` makes of the runs in
[benchmarks/results/continual](../benchmarks/results/continual), and of nothing else. One command
carries an experiment out, or goes on with it after a kill:

```sh
python -m benchmarks.continual run growth
python -m benchmarks.continual report
```

How to read it:

- A **source** is trained first. **Arms** spend extra compute: they go on with the source, with what
  growkit made of it, or begin with new weights. Budgets are FLOPs, by the formula in
  [compute.py](../benchmarks/continual/compute.py), attention included.
- The rate is warmed up, stays, and decays to zero in the last fifth of every budget. All losses in
  tables are taken after it has decayed.
- Every arm was tried with the same learning rates, on the first seed, and the best by the loss on
  validation files at the last point of all was taken for all seeds and all points: for a smaller
  budget another rate may be better. Reported is the loss on other files, which chose nothing, in
  nats per token.
- In charts, bars reach from the lowest seed to the highest.
- ± is half of the 95 % confidence interval over seeds (Student's t), of differences between arms
  with the same seed. A difference is **noise** where the interval holds zero. Seeds are few, so
  the intervals are wide; and each claim is judged by itself, so that of many that say nothing one
  in twenty seems to.
"""


def write(lines: Path, page: Path) -> None:
    """Write the page, with a folder of charts of the same name.

    Args:
        lines: folder of result files.
        page: Markdown file to write.
    """
    charts = page.with_suffix("")
    charts.mkdir(parents=True, exist_ok=True)
    parts = [HEAD]
    for name in names():
        found = results.read(lines / f"{name}.jsonl")
        for scale in dict.fromkeys(line["scale"] for line in found):
            experiment = load(name, scale)
            of_scale = [line for line in found if line["scale"] == scale]
            parts += _section(experiment, of_scale, charts)
    if len(parts) == 1:
        raise SystemExit(f"there are no results in {lines}; carry an experiment out first")
    page.write_text("\n".join(parts).rstrip() + "\n", "utf-8")


def _section(experiment: Experiment, lines: Sequence[Line], charts: Path) -> Iterator[str]:
    known = {*experiment.sources, *experiment.arms}
    fit = [
        line
        for line in lines
        if line["run"] in known
        and line["settings"] == settings_of(experiment, line["run"], line["text"]["sha256"])
    ]
    by_run = {(line["run"], line["seed"], line["rate"]): line for line in fit}
    made = outcomes(experiment, by_run)
    yield f"## {experiment.name}, {experiment.scale_name}\n"
    yield f"{experiment.question}\n"
    yield _state(experiment, made, len(by_run), len(lines) - len(fit))
    if not by_run:
        return
    yield _setting(experiment, fit)
    shown = {name: each for name, each in made.items() if name in experiment.arms}
    baseline = shown.get(experiment.baseline)
    if baseline is None:
        yield "The baseline is not done yet, so nothing is compared.\n"
        return
    yield from _charts(experiment, shown, baseline, charts)
    yield _table(experiment, shown, baseline)
    yield from _headlines(shown, baseline)
    yield from _measures(shown)
    yield from _claims(experiment, shown)
    yield _rates(experiment, made)


def _state(experiment: Experiment, made: Mapping[str, Outcome], done: int, left_out: int) -> str:
    trained = [name for name, each in experiment.sources.items() if each.trained]
    each = len(experiment.learning_rates) + len(experiment.seeds) - 1
    wanted = each * (len(trained) + len(experiment.arms))
    parts = []
    if done < wanted:
        parts.append(f"**Unfinished:** {done} of {wanted} runs are done.")
        some = [name for name, each in made.items() if len(each.lines) < len(experiment.seeds)]
        if some:
            parts.append(f"Fewer seeds than the others: {', '.join(some)}.")
    if left_out:
        parts.append(f"{left_out} runs of other settings are left out.")
    return " ".join(parts) + "\n" if parts else ""


def _setting(experiment: Experiment, lines: Sequence[Line]) -> str:
    scale, text = experiment.scale, lines[0]["text"]
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
        f"{text['sha256'][:16]}…), {_count(text['tokens']['train'])} tokens of a BPE of "
        f"{text['vocabulary']:,}; read at most {max(line['epochs'] for line in lines):.2g} times.",
        f"- Parameters: {'; '.join(f'{_count(n)}: ' + ', '.join(of) for n, of in sizes.items())}.",
        f"- Budgets: a source gets {_count(scale.source_tokens)} tokens, an arm {scale.extra:g} "
        f"times its FLOPs. {scale.batch} windows of {scale.context} tokens a step, AdamW with "
        f"betas {scale.betas[0]:g} and {scale.betas[1]:g}, decay {scale.weight_decay:g} of "
        f"matrices, no clipping, {scale.dtype}.",
        f"- Seeds: {', '.join(map(str, experiment.seeds))}.",
    ]
    said += [f"- {count} runs on {name}." for name, count in machines.items()]
    return "\n".join([*said, f"- {hours:.1f} hours of one process in all.\n"])


def _charts(
    experiment: Experiment, shown: Mapping[str, Outcome], baseline: Outcome, folder: Path
) -> Iterator[str]:
    name = f"{experiment.name}-{experiment.scale_name}"
    for number, (title, arms) in enumerate(experiment.charts.items()):
        of = {arm: shown[arm] for arm in arms if arm in shown}
        if not of:
            continue
        panels = [_panel(of, "test loss by extra compute", False)]
        if any(each.before for arm in of.values() for each in arm.curves.values()):
            panels.append(_panel(of, "test loss by compute, with the source's", True))
        whole = f"{experiment.name}: {title}"
        file = folder / f"{name}-{number + 1}.svg"
        file.write_text(line_chart(whole, panels), "utf-8")
        yield f"![{whole}: test loss by compute]({folder.name}/{file.name})\n"
    rows = []
    for arm, outcome in shown.items():
        found = differences(outcome.test_at(_last(outcome)), baseline.test_at(_last(outcome)))
        if found and arm != baseline.name:
            rows.append(Row(arm, found.values, found.margin, _signed(found)))
    if rows:
        title = f"{experiment.name}: test loss above that of “{baseline.name}”"
        file = folder / f"{name}-differences.svg"
        said = "nats per token at equal extra compute; a dot for each seed, 95 % interval"
        file.write_text(dot_chart(title, said, rows, 0.0), "utf-8")
        yield f"![{title}]({folder.name}/{file.name})\n"


def _last(outcome: Outcome) -> Any:
    """The last point that is not the one of the total compute."""
    curve = next(iter(outcome.curves.values()))
    return [each for each in curve.at if each != "total"][-1]


def _panel(arms: Mapping[str, Outcome], title: str, total: bool) -> Panel:
    lines = {}
    for name, outcome in arms.items():
        curves: list[Curve] = list(outcome.curves.values())
        points = []
        for number in range(len(curves[0].at)):
            values = [curve.test[number] for curve in curves]
            x = curves[0].flops[number] + (curves[0].before if total else 0)
            points.append(Point(x, fmean(values), min(values), max(values)))
        lines[name] = points
    return Panel(title, "FLOPs", lines)


def _table(experiment: Experiment, shown: Mapping[str, Outcome], baseline: Outcome) -> str:
    shares = list(dict.fromkeys(share for each in shown.values() for share in _shares(each)))
    heads = [f"{share:g} of the extra" if share != "total" else "total" for share in shares]
    said = [
        "Test loss where the rate has decayed, by compute (mean over seeds), and how far it is "
        f"above “{baseline.name}”, seed by seed:\n",
        f"| arm | rate | {' | '.join(heads)} |",
        f"| --- | --- |{' --- |' * len(heads)}",
    ]
    for name, outcome in shown.items():
        cells = []
        for share in shares:
            values = outcome.test_at(share)
            if not values:
                cells.append("")
                continue
            cell = f"{fmean(values.values()):.4f}"
            above = differences(values, baseline.test_at(share))
            if above and name != baseline.name:
                cell += f" ({_signed(above)})"
            cells.append(cell)
        said.append(f"| {name} | {_rate(outcome)} | {' | '.join(cells)} |")
    return "\n".join(said) + "\n"


def _shares(outcome: Outcome) -> tuple[Any, ...]:
    return next(iter(outcome.curves.values())).at


def _headlines(shown: Mapping[str, Outcome], baseline: Outcome) -> Iterator[str]:
    for share in dict.fromkeys((_last(baseline), *_shares(baseline)[-1:])):
        goals = baseline.test_at(share)
        what = "extra" if share != "total" else "total"
        yield (
            f"**To the loss of “{baseline.name}” at {'the same' if share != 'total' else 'equal'} "
            f"{what} compute** ({fmean(goals.values()):.4f}; between two points in a straight line "
            "over the logarithm; < is the least that was tried, > the most, and the loss was not "
            "reached):\n"
        )
        said = [
            "| arm | extra tokens | extra FLOPs | FLOPs with the source's | faster, extra | "
            "faster, with the source's |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, outcome in shown.items():
            found = reached(outcome, baseline, share)
            if found is None:
                continue
            cells = [
                _amounts(found.signs, found.tokens),
                _amounts(found.signs, found.flops),
                _amounts(found.signs, found.total),
                _times(found.signs, found.saved),
                _times(found.signs, found.saved_total),
            ]
            said.append(f"| {name} | {' | '.join(cells)} |")
        yield "\n".join(said) + "\n"


LOSSES = ("at", "tokens", "flops", "validation", "test")
"""What is known of every point."""


def _measures(shown: Mapping[str, Outcome]) -> Iterator[str]:
    """What else was measured at the last point."""
    points = {
        name: [line["points"][-1] for line in each.lines.values()] for name, each in shown.items()
    }
    kinds = [key for key in next(iter(points.values()))[0] if key not in LOSSES]
    if not kinds:
        return
    said = [f"| arm | {' | '.join(kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    for name, each in points.items():
        spreads = [Spread(tuple(point[kind] for point in each)) for kind in kinds]
        cells = [
            f"{spread.mean:.3f}" + (f" ± {spread.margin:.3f}" if spread.margin is not None else "")
            for spread in spreads
        ]
        said.append(f"| {name} | {' | '.join(cells)} |")
    yield "\n".join(["At the last point (mean over seeds):\n", *said]) + "\n"


def _claims(experiment: Experiment, shown: Mapping[str, Outcome]) -> Iterator[str]:
    if not experiment.claims:
        return
    said = ["| what is said | difference here | does it appear? |", "| --- | --- | --- |"]
    for claim in experiment.claims:
        one, other = shown.get(claim["better"]), shown.get(claim["than"])
        found = None
        if one and other:
            at, against = claim.get("at", 1), claim.get("against", claim.get("at", 1))
            found = differences(one.test_at(at), other.test_at(against))
        if found is None:
            said.append(f"| {claim['says']} | | not run |")
        else:
            said.append(f"| {claim['says']} | {_signed(found)} | {verdict(found)} |")
    yield "\n".join(["**Claims**, as differences of the test loss:\n", *said]) + "\n"


def verdict(found: Spread) -> str:
    """Whether what should be lower is."""
    if found.margin is None:
        return "one seed says nothing"
    if abs(found.mean) <= found.margin:
        return "noise"
    return "yes" if found.mean < 0 else "no, the other way round"


def _rates(experiment: Experiment, made: Mapping[str, Outcome]) -> str:
    rates = experiment.learning_rates
    said = [
        "Validation loss at the last point with every learning rate, on the first seed:\n",
        f"| | {' | '.join(f'{each:g}' for each in rates)} |",
        f"| --- |{' --- |' * len(rates)}",
    ]
    for name, outcome in made.items():
        cells = [
            "diverged" if (loss := outcome.tried[rate]) is None else f"{loss:.4f}" for rate in rates
        ]
        cells = [
            f"**{cell}**" if rate == outcome.rate else cell
            for cell, rate in zip(cells, rates, strict=True)
        ]
        said.append(f"| {name} | {' | '.join(cells)} |")
    if edges := [name for name, each in made.items() if each.at_edge]:
        said.append(f"\nAt the edge of what was tried: {', '.join(edges)}.")
    return "\n".join(said) + "\n"


def _rate(outcome: Outcome) -> str:
    return f"{outcome.rate:g}{' (edge)' * outcome.at_edge}"


def _signed(found: Spread) -> str:
    margin = "" if found.margin is None else f" ± {found.margin:.4f}"
    return f"{found.mean:+.4f}{margin}".replace("-", "−")


def _times(signs: Sequence[str], found: Spread) -> str:
    """A ratio from its logarithms, with its interval; a bound where not all seeds have one."""
    if ">" in signs:
        return f"< {math.exp(max(found.values)):.2f}" if set(signs) == {">"} else ""
    if "<" in signs:
        return f"> {math.exp(min(found.values)):.2f}"
    middle = math.exp(found.mean)
    if found.margin is None:
        return f"{middle:.2f}"
    low, high = math.exp(found.mean - found.margin), math.exp(found.mean + found.margin)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _amounts(signs: Sequence[str], values: Sequence[float]) -> str:
    """The mean where all seeds have one, else each seed's."""
    if set(signs) == {"="}:
        low, high = min(values), max(values)
        spread = f" ({_count(low)} to {_count(high)})" if high > low else ""
        return f"{_count(fmean(values))}{spread}"
    if len({*zip(signs, values, strict=True)}) == 1:
        return f"{signs[0]} {_count(values[0])}"
    pairs = zip(signs, values, strict=True)
    return ", ".join(f"{sign.strip('=')} {_count(value)}".strip() for sign, value in pairs)


def _count(value: float) -> str:
    """A large number as people read it."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
