"""The view of a probe."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from growkit.base.units import size
from growkit.extras.probing.results.probe_result import (
    difference_between,
    is_ahead,
    nats,
    probe_next,
    standing,
)
from growkit.report.drawing import MAX_LINES, Curve, Interval, Titles, curves, intervals
from growkit.report.view import (
    Cell,
    Chart,
    Found,
    Grid,
    Paragraph,
    ResultView,
    Topic,
    figure,
    recorded,
)

WORDS = {"diverged": "not finite", "broken": "broken, not trained", "refused": "refused"}
SETTINGS = (
    *("source", "steps", "warmup", "batch", "length", "seeds", "lr", "weight_decay", "dtype"),
    *("device", "text", "text_sha256", "training_tokens", "held_out_tokens", "work", "created"),
    *("seconds", "versions"),
)
"""Keys of the result that a page shows unchanged."""

UNITS = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs", "EFLOPs", "ZFLOPs")


def probe_view(result: Found) -> ResultView:
    """Make the view of a ``growkit.ProbeResult``."""
    source, best, difference = standing(result)
    tried = [candidate for candidate in result["candidates"] if not candidate["source"]]
    trained = sum(bool(candidate["curves"]) for candidate in tried)
    ahead = f"{best['name']} is ahead" if best and is_ahead(best, difference) else ""
    name, were = Path(str(result["source"])).name, "was" if trained == 1 else "were"
    return ResultView(
        "good" if ahead and not result["early"] else "warn",
        f"{ahead or 'No candidate is ahead'}{' so far' if result['early'] else ''}",
        about=name,
        subject=f"{name}: {trained} of {len(tried)} candidates {were} trained as the source itself "
        "was",
        reason=str(result["reason"]),
        advice=recorded({"Next": probe_next(result)}),
        warnings=result["warnings"],
        sections=[
            _order(result, source),
            *_losses(result),
            _against_source(result, source),
            _pairs(result),
            _rates(result),
            _measurement(result),
        ],
    )


VIEWS = {"ProbeResult": probe_view}


def _ranked(result: Found) -> list[Found]:
    return [candidate for candidate in result["candidates"] if candidate["outcome"] == "ranked"]


def _name(candidate: Found) -> str:
    return f"{candidate['name']}{', trained further' if candidate['source'] else ''}"


def _above(result: Found, one: Found, other: Found) -> Interval | None:
    """Compute how far the loss of one is above the other's; None if they were not compared."""
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
    def shown(model: Found, key: str, form: str = ".4f") -> str:
        return "" if model[key] is None else figure(model[key], form)

    def above(model: Found, other: Found) -> str:
        interval = _above(result, model, other)
        return _nats(interval.mean, "+", noise=interval.noise) if interval else ""

    rows = [
        [
            Cell(_name(model), "; ".join(model["steps"])),
            *(shown(model, "rank"), shown(model, "parameters"), shown(model, "lr", ".3g")),
            *(shown(model, "loss") or WORDS[model["outcome"]], shown(model, "spread")),
            *(above(model, source), above(model, result["candidates"][0])),
            shown(model, "last_loss"),
        ]
        for model in result["candidates"]
    ]
    heads = ["candidate", "rank", "parameters", "rate", "loss", "spread"]
    heads += ["to the source", "to the first", "after the last step"]
    why_not = {
        candidate["name"]: f"{WORDS[candidate['outcome']]} ({candidate['reason']})"
        for candidate in result["candidates"]
        if candidate["reason"]
    }
    parts: list[Any] = [Grid(heads, rows, "hnnnnnnnn"), why_not]
    if equal := _equal(result):
        sentence = (
            f"Losses in nats per token on {result['held_out_tokens']:,} held-out tokens after "
            f"{equal} of training each; mean and standard deviation over {result['seeds']} seeds."
        )
        parts.append(Paragraph(sentence))
    return Topic("The order", parts, brief=True)


def _losses(result: Found) -> Iterator[Topic]:
    """Draw losses of the source and the first candidates over training, by compute and by steps."""
    drawn = sorted(_ranked(result), key=lambda candidate: not candidate["source"])[:MAX_LINES]
    y_title = "loss, nats per token"
    if drawn and (equal := result["equal_compute"]):
        scales = [candidate["step_flops"] / equal for candidate in drawn]
        titles = Titles("Loss by compute", f"compute, in {_equal(result)}", y_title)
        yield _curves(drawn, scales, 1.0, titles)
    if drawn:
        yield _curves(
            drawn, [1.0] * len(drawn), math.inf, Titles("Loss by steps", "steps", y_title)
        )


def _curves(
    drawn: Sequence[Found], scales: Sequence[float], highest: float, titles: Titles
) -> Topic:
    """Draw losses up to a position on the axis; ``scales`` converts steps to positions."""
    lines = []
    for candidate, scale in zip(drawn, scales, strict=True):
        by_seed = [
            [
                (step * scale, loss)
                for step, loss in zip(curve["steps"], curve["losses"], strict=True)
                if step * scale <= highest * (1 + 1e-9)
            ]
            for curve in candidate["curves"]
            if curve["lr"] == candidate["lr"]
        ]
        if highest < math.inf and by_seed[0][-1][0] < highest:
            for points, loss in zip(by_seed, candidate["losses"], strict=True):
                points.append((highest, loss))
        lines.append(Curve(_name(candidate), by_seed))
    start = max(line.mean[0][1] for line in lines)
    return Topic(titles.chart, charts=[Chart(curves(lines, titles, highest=2 * start))], half=True)


def _against_source(result: Found, source: Found) -> Topic:
    rows = [
        interval for candidate in _ranked(result) if (interval := _above(result, candidate, source))
    ]
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
    heads, fold = ["lower loss", "higher loss", "higher by", "interval"], "All pairs"
    table = Grid(heads, rows, "htnn", fold=fold)
    return Topic("What is noise", [table, Paragraph(result["rule"])] if rows else [])


def _rates(result: Found) -> Topic:
    rates = [f"{rate:g}" for rate in result["lr"]]
    rows = [
        [
            candidate["name"],
            *("not finite" if loss is None else f"{loss:.4f}" for loss in candidate["by_lr"]),
        ]
        for candidate in result["candidates"]
        if candidate["by_lr"] and len(rates) > 1
    ]
    return Topic("By learning rate", [Grid(["rate", *rates], rows, "h" + "n" * len(rates))])


def _measurement(result: Found) -> Topic:
    settings = recorded({"equal compute": _equal(result)}) | recorded(result, SETTINGS)
    rows = [
        [
            f"{candidate['name']}, {curve['lr']:g}, seed {curve['seed']}",
            len(curve["steps"]),
            *(figure(curve["losses"][at], ".4f") for at in (0, -1)),
        ]
        for candidate in result["candidates"]
        for curve in candidate["curves"]
    ]
    heads = ["training", "looks", "loss before", "loss at the end"]
    table = Grid(heads, rows, "hnnn", fold=f"All {len(rows):,} trainings")
    return Topic("How the trainings were compared", [settings, table])
