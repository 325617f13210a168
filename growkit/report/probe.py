"""The view of a probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from growkit.report.drawing import MOST_LINES, Curve, Interval, Titles, curves, intervals
from growkit.report.view import (
    Chart,
    Entry,
    Facts,
    Grid,
    Paragraph,
    Section,
    View,
    figure,
    recorded,
)
from growkit.results.probe import difference_between, leader, nats, probe_next

Found = Mapping[str, Any]

WORDS = {
    "ranked": "",
    "diverged": "not finite",
    "broken": "broken, not trained",
    "refused": "refused",
}
SETTINGS = (
    *("source", "steps", "warmup", "batch", "length", "seeds", "dtype", "device", "text_sha256"),
    *("training_tokens", "held_out_tokens", "work", "created", "seconds", "versions"),
)
"""Keys of the result that a page shows as they are."""

Y_TITLE = "loss, nats per token"
UNITS = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs", "EFLOPs", "ZFLOPs")


def probe_view(result: Found) -> View:
    """The view of a ``growkit.ProbeResult``."""
    candidates = result["candidates"]
    source = next(each for each in candidates if each["source"])
    ranked = [each for each in candidates if each["outcome"] == "ranked"]
    name = Path(str(result["source"])).name
    tried = [each for each in candidates if not each["source"]]
    trained = sum(bool(each["curves"]) for each in tried)
    kind, heading = _verdict(result)
    were = "was" if trained == 1 else "were"
    return View(
        kind,
        heading,
        about=name,
        subject=f"{name}: {trained} of {len(tried)} candidates {were} trained as the source itself "
        "was",
        reason=str(result["reason"]),
        advice=Facts({"Next": probe_next(result)}),
        warnings=result["warnings"],
        sections=[
            _order(result, source),
            *(_losses(result, source, ranked) if ranked else []),
            _against_source(result, source, ranked),
            _pairs(result),
            _rates(result),
            _measurement(result),
        ],
    )


def _verdict(result: Found) -> tuple[str, str]:
    """The kind and the heading of a verdict."""
    early = " so far" if result["early"] else ""
    if ahead := leader(result):
        return "warn" if early else "good", f"{ahead['name']} is ahead{early}"
    return "warn", f"No candidate is ahead{early}"


def _name(candidate: Found) -> str:
    further = ", trained further" if candidate["source"] else ""
    return f"{candidate['name']}{further}"


def _apart(result: Found, name: str, other: str) -> str:
    """How far the loss of one is above another's, and whether that is noise; empty if unknown."""
    pair = difference_between(result, name, other)
    if pair is None:
        return ""
    sign = 1 if pair["worse"] == name else -1
    return f"{nats(sign * pair['difference'], '+')}{', noise' if pair['noise'] else ''}"


def _compute(flops: float) -> tuple[float, str]:
    """A unit that fits so many floating-point operations, and its name."""
    power = next((n for n in range(len(UNITS)) if flops < 1000.0 ** (n + 1)), len(UNITS) - 1)
    return 1000.0**power, UNITS[power]


def _equal(result: Found) -> str | None:
    """The compute at which losses are compared, e.g. ``3.1 TFLOPs``."""
    if result["equal_compute"] is None:
        return None
    unit, name = _compute(result["equal_compute"])
    return f"{result['equal_compute'] / unit:.3g} {name}"


def _order(result: Found, source: Found) -> Section:
    rows, first = [], result["candidates"][0]
    for each in result["candidates"]:
        steps, why = "; ".join(each["steps"]), each["reason"]
        note = f"{steps}. {each['outcome'].capitalize()}: {why}" if why else steps
        cells = (
            ("rank", "{}"),
            ("parameters", "{:,}"),
            ("lr", "{:g}"),
            ("loss", "{:.4f}"),
            ("spread", "{:.4f}"),
            ("last_loss", "{:.4f}"),
        )
        shown = ["" if each[key] is None else form.format(each[key]) for key, form in cells]
        shown[3] = shown[3] or WORDS[each["outcome"]]
        apart = [_apart(result, each["name"], other["name"]) for other in (source, first)]
        rows.append([Entry(_name(each), note), *shown[:-1], *apart, shown[-1]])
    heads = ["candidate", "rank", "parameters", "rate", "loss", "spread"]
    heads += ["to the source", "to the first", "after the last step"]
    why_not = {
        each["name"]: f"{WORDS[each['outcome']]} ({each['reason']})"
        for each in result["candidates"]
        if each["reason"]
    }
    parts: list[Any] = [Grid(heads, rows, "hnnnnnnnn"), Facts(why_not)]
    if equal := _equal(result):
        sentence = (
            f"Losses in nats per token on {result['held_out_tokens']:,} held-out tokens after "
            f"{equal} of training each; mean and standard deviation over {result['seeds']} seeds."
        )
        parts.append(Paragraph(sentence))
    return Section("The order", parts, brief=True)


def _losses(result: Found, source: Found, ranked: Sequence[Found]) -> list[Section]:
    """Losses along the training, by compute and by steps."""
    found = []
    if result["equal_compute"] is not None:
        unit, name = _compute(result["equal_compute"])
        scales = {each["name"]: each["step_flops"] / unit for each in ranked}
        most = result["equal_compute"] / unit
        titles = Titles("Loss by compute", f"compute, {name}", Y_TITLE)
        chart = _curves(source, ranked, scales, titles, most)
        found.append(Section("Loss by compute", charts=[chart], half=True))
    scales = {each["name"]: 1.0 for each in ranked}
    chart = _curves(source, ranked, scales, Titles("Loss by steps", "steps", Y_TITLE))
    return [*found, Section("Loss by steps", charts=[chart], half=True)]


def _curves(
    source: Found,
    ranked: Sequence[Found],
    scales: Mapping[str, float],
    titles: Titles,
    most: float = math.inf,
) -> Chart:
    """Losses of the source and the first candidates, up to a position on the axis."""
    lines, start = [], 0.0
    others = [each for each in ranked if not each["source"]]
    first = [source] if source in ranked else []
    for style, candidate in enumerate([*first, *others][:MOST_LINES]):
        trained = [each for each in candidate["curves"] if each["lr"] == candidate["lr"]]
        by = scales[candidate["name"]]
        each = [
            [
                (step * by, loss)
                for step, loss in zip(curve["steps"], curve["losses"], strict=True)
                if step * by <= most * (1 + 1e-9)
            ]
            for curve in trained
        ]
        mean = [
            (points[0][0], fmean(loss for _, loss in points)) for points in zip(*each, strict=True)
        ]
        if most < math.inf and candidate["loss"] is not None and mean[-1][0] < most:
            mean.append((most, candidate["loss"]))
            for points, loss in zip(each, candidate["losses"], strict=True):
                points.append((most, loss))
        start = max(start, mean[0][1])
        lines.append(Curve(_name(candidate), mean, each, style))
    return Chart(curves(lines, titles, most=2 * start))


def _against_source(result: Found, source: Found, ranked: Sequence[Found]) -> Section:
    rows = []
    for each in ranked:
        pair = difference_between(result, each["name"], source["name"])
        if pair is None or each is source:
            continue
        sign = 1 if pair["worse"] == each["name"] else -1
        low, high = sorted((sign * pair["low"], sign * pair["high"]))
        seeds = [a - b for a, b in zip(each["losses"], source["losses"], strict=True)]
        mean = sign * pair["difference"]
        rows.append(Interval(each["name"], mean, low, high, seeds, pair["noise"]))
    title = "Against the source, trained further"
    chart = intervals(rows, Titles(title, "loss − loss of the source, nats per token"))
    return Section(title, charts=[Chart(chart)] if rows else [], half=True)


def _pairs(result: Found) -> Section:
    rows = [
        [
            pair["better"],
            pair["worse"],
            f"{nats(pair['difference'])}{', noise' if pair['noise'] else ''}",
            f"{nats(pair['low'])} to {nats(pair['high'])}",
        ]
        for pair in result["differences"]
    ]
    table = Grid(["lower loss", "higher loss", "higher by", "interval"], rows, "htnn")
    parts = [table, Paragraph(result["rule"])] if rows else []
    return Section("What is noise", parts, brief=True)


def _rates(result: Found) -> Section:
    rates = [f"{rate:g}" for rate in result["lr"]]
    rows = [
        [each["name"], *("not finite" if loss is None else f"{loss:.4f}" for loss in each["by_lr"])]
        for each in result["candidates"]
        if each["by_lr"] and len(rates) > 1
    ]
    table = Grid(["rate", *rates], rows, "h" + "n" * len(rates))
    return Section("By learning rate", [table])


def _measurement(result: Found) -> Section:
    found = {
        **recorded(result, SETTINGS),
        "learning rates": ", ".join(f"{rate:g}" for rate in result["lr"]),
        "weight decay": f"{result['weight_decay']:g}",
        "equal compute": _equal(result),
        "text": Path(str(result["text"])).name,
    }
    rows = [
        [
            f"{each['name']}, {curve['lr']:g}, seed {curve['seed']}",
            len(curve["steps"]),
            *(figure(curve["losses"][at], ".4f") for at in (0, -1)),
        ]
        for each in result["candidates"]
        for curve in each["curves"]
    ]
    heads = ["training", "looks", "loss before", "loss at the end"]
    table = Grid(heads, rows, "hnnn", fold=f"All {len(rows):,} trainings")
    return Section("How the trainings were compared", [Facts(found), table])
