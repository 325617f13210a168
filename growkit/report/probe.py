"""The view of a probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from growkit.base.units import size
from growkit.report.drawing import MOST_LINES, Curve, Interval, Titles, curves, intervals
from growkit.report.view import Cell, Chart, Found, Grid, Paragraph, Topic, View, figure, recorded
from growkit.results.probe import difference_between, leader, nats, probe_next

WORDS = {
    "ranked": "",
    "diverged": "not finite",
    "broken": "broken, not trained",
    "refused": "refused",
}
SETTINGS = (
    *("source", "steps", "warmup", "batch", "length", "seeds", "lr", "weight_decay", "dtype"),
    *("device", "text", "text_sha256", "training_tokens", "held_out_tokens", "work", "created"),
    *("seconds", "versions"),
)
"""Keys of the result that a page shows as they are."""

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
        advice={"Next": probe_next(result)},
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


def _above(result: Found, one: Found, other: Found) -> Interval | None:
    """How far the loss of one is above another's; None if they were not compared."""
    pair = difference_between(result, one["name"], other["name"])
    if pair is None:
        return None
    sign = 1 if pair["worse"] == one["name"] else -1
    low, high = sorted((sign * pair["low"], sign * pair["high"]))
    seeds = [a - b for a, b in zip(one["losses"], other["losses"], strict=True)]
    return Interval(one["name"], sign * pair["difference"], low, high, seeds, pair["noise"])


def _nats(value: float, sign: str, *, noise: bool) -> str:
    return f"{nats(value, sign)}{', noise' if noise else ''}"


def _equal(result: Found) -> str | None:
    """The compute at which losses are compared, e.g. ``3.1 TFLOPs``."""
    return size(result["equal_compute"], UNITS) if result["equal_compute"] is not None else None


def _order(result: Found, source: Found) -> Topic:
    rows, first = [], result["candidates"][0]
    for each in result["candidates"]:
        keys = ("rank", "parameters", "lr", "loss", "spread")
        shown = [
            "" if each[key] is None else figure(each[key], ".3g" if key == "lr" else ".4f")
            for key in (*keys, "last_loss")
        ]
        shown[3] = shown[3] or WORDS[each["outcome"]]
        above = [_above(result, each, other) for other in (source, first)]
        apart = [_nats(found.mean, "+", noise=found.noise) if found else "" for found in above]
        rows.append([Cell(_name(each), "; ".join(each["steps"])), *shown[:-1], *apart, shown[-1]])
    heads = ["candidate", "rank", "parameters", "rate", "loss", "spread"]
    heads += ["to the source", "to the first", "after the last step"]
    why_not = {
        each["name"]: f"{WORDS[each['outcome']]} ({each['reason']})"
        for each in result["candidates"]
        if each["reason"]
    }
    parts: list[Any] = [Grid(heads, rows, "hnnnnnnnn"), why_not]
    if equal := _equal(result):
        sentence = (
            f"Losses in nats per token on {result['held_out_tokens']:,} held-out tokens after "
            f"{equal} of training each; mean and standard deviation over {result['seeds']} seeds."
        )
        parts.append(Paragraph(sentence))
    return Topic("The order", parts, brief=True)


def _losses(result: Found, source: Found, ranked: Sequence[Found]) -> list[Topic]:
    """Losses of the source and the first candidates along the training, by compute and by steps."""
    others = [each for each in ranked if not each["source"]]
    drawn = [*([source] if source in ranked else []), *others][:MOST_LINES]
    plots = [("Loss by steps", "steps", {each["name"]: 1.0 for each in drawn}, math.inf)]
    if equal := result["equal_compute"]:
        scales = {each["name"]: each["step_flops"] / equal for each in drawn}
        plots.insert(0, ("Loss by compute", f"compute, in {_equal(result)}", scales, 1.0))
    found = []
    for title, x_title, scales, most in plots:
        chart = _curves(drawn, scales, most, Titles(title, x_title, "loss, nats per token"))
        found.append(Topic(title, charts=[chart], half=True))
    return found


def _curves(drawn: Sequence[Found], scales: Found, most: float, titles: Titles) -> Chart:
    """Losses up to a position on the axis, to which ``scales`` converts steps."""
    lines, start = [], 0.0
    for style, candidate in enumerate(drawn):
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


def _against_source(result: Found, source: Found, ranked: Sequence[Found]) -> Topic:
    rows = [found for each in ranked if (found := _above(result, each, source))]
    title = "Against the source, trained further"
    chart = intervals(rows, Titles(title, "loss − loss of the source, nats per token"))
    return Topic(title, charts=[Chart(chart)] if rows else [], half=True)


def _pairs(result: Found) -> Topic:
    rows = [
        [
            pair["better"],
            pair["worse"],
            _nats(pair["difference"], "", noise=pair["noise"]),
            f"{nats(pair['low'])} to {nats(pair['high'])}",
        ]
        for pair in result["differences"]
    ]
    table = Grid(["lower loss", "higher loss", "higher by", "interval"], rows, "htnn")
    parts = [table, Paragraph(result["rule"])] if rows else []
    return Topic("What is noise", parts, brief=True)


def _rates(result: Found) -> Topic:
    rates = [f"{rate:g}" for rate in result["lr"]]
    rows = [
        [each["name"], *("not finite" if loss is None else f"{loss:.4f}" for loss in each["by_lr"])]
        for each in result["candidates"]
        if each["by_lr"] and len(rates) > 1
    ]
    table = Grid(["rate", *rates], rows, "h" + "n" * len(rates))
    return Topic("By learning rate", [table])


def _measurement(result: Found) -> Topic:
    found = recorded({"equal compute": _equal(result)}) | recorded(result, SETTINGS)
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
    return Topic("How the trainings were compared", [found, table])
