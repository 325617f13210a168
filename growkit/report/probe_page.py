"""A probe as one HTML file, in the form of a proof's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from growkit.base.units import duration
from growkit.report.curves import MOST_LINES, Curve, Interval, curves, intervals
from growkit.report.document import document
from growkit.report.header import SIGNS
from growkit.report.markup import begun, escape, facts, figure, framed, more, section, table
from growkit.report.probe import HEADS, called, compute, order, told, unit_of, why_not
from growkit.results.probe import difference_between, leader, nats, probe_next

Found = Mapping[str, Any]


def probe_page(result: Found) -> str:
    """The report of a probe.

    Args:
        result: a ``growkit.ProbeResult``.

    Returns:
        The HTML file.
    """
    name = Path(str(result["source"])).name
    parts = [_order, _by_compute, _by_steps, _to_the_source, _pairs, _rates, _measured]
    main = "".join(part(result) for part in parts)
    return document(f"{verdict_of(result)[1]}: {name}", _header(result), main)


def verdict_of(result: Found) -> tuple[str, str]:
    """Its colour and its words."""
    source = _source(result)
    if source["outcome"] != "ranked":
        return "warn", "Nothing to compare candidates with"
    early = " so far" if result["early"] else ""
    if ahead := leader(result):
        return "warn" if early else "good", f"{ahead['name']} is ahead{early}"
    best = next((each for each in _ranked(result) if each is not source), None)
    pair = best and difference_between(result, best["name"], source["name"])
    if pair and pair["noise"]:
        return "warn", f"No candidate is ahead beyond noise{early}"
    return "warn", f"No candidate is ahead{early}"


def _source(result: Found) -> Any:
    return next(each for each in result["candidates"] if each["source"])


def _ranked(result: Found) -> list[Any]:
    return [each for each in result["candidates"] if each["outcome"] == "ranked"]


def _header(result: Found) -> str:
    kind, verdict = verdict_of(result)
    name = Path(str(result["source"])).name
    tried = [each for each in result["candidates"] if not each["source"]]
    trained = sum(bool(each["curves"]) for each in tried)
    were = "was" if trained == 1 else "were"
    warnings = "".join(f"<p>! {begun(each)}.</p>" for each in result["warnings"])
    return (
        f'<header><div class="verdict {kind}"><p><strong>{escape(name)}</strong>: {trained} of '
        f"{len(tried)} candidates {were} trained as the source itself was</p>"
        f'<h1><span aria-hidden="true">{SIGNS[kind]}</span> {escape(verdict)}</h1>'
        f"{facts({'Next': probe_next(result)}, 'to-do')}"
        f'<p class="reason">{begun(result["reason"])}.</p>{warnings}</div></header>'
    )


def _order(result: Found) -> str:
    rows = [
        [(each[1], _made(candidate)), each[0] or None, *(cell or None for cell in each[2:])]
        for each, candidate in zip(order(result), result["candidates"], strict=True)
    ]
    rows = [["" if cell is None else cell for cell in row] for row in rows]
    heads = ["", "rank", *HEADS[2:]]
    text = " ".join(told(result)[:1])
    return section(
        "The order",
        f"{text[:1].upper()}{text[1:]}. “To the source” is how far the loss is above that of the "
        "source, trained further, “to the first” how far above the first of the order; where it is "
        "below, the number is negative, and less is better. The last column is after equally many "
        "tokens, which cost more compute the larger a model is."
        if text
        else "Nothing was trained to its end.",
        table(heads, rows, "hnnnnnnnn"),
    )


def _made(candidate: Found) -> str:
    """How it was made, or why it is not ranked."""
    steps = "; ".join(candidate["steps"])
    why = candidate["reason"]
    return f"{steps}. {candidate['outcome'].capitalize()}: {why}" if why else steps


def _by_compute(result: Found) -> str:
    equal = result["equal_compute"]
    if equal is None:
        return ""
    unit, name = unit_of(equal)
    chart = _curves(
        result,
        [each["step_flops"] / unit for each in _ranked(result)],
        equal / unit,
        "Loss by compute",
        f"compute, {name}",
    )
    return section(
        "Loss by compute",
        "On held-out text, up to equal compute, where the order is made. Thick lines are means, "
        "thin ones the seeds.",
        framed(chart),
        half=True,
    )


def _by_steps(result: Found) -> str:
    if not _ranked(result):
        return ""
    chart = _curves(result, [1.0 for _ in _ranked(result)], float("inf"), "Loss by steps", "steps")
    return section(
        "Loss by steps",
        "The same trainings to their end, by steps: after equally many tokens. What is ahead here "
        "and not at equal compute has cost more.",
        framed(chart),
        half=True,
    )


def _curves(result: Found, scale: Sequence[float], most: float, title: str, x_title: str) -> str:
    """Losses of all that are ranked, up to some place of the axis."""
    lines, start = [], 0.0
    candidates = _drawn(result)
    scales = {each["name"]: by for each, by in zip(_ranked(result), scale, strict=True)}
    for style, candidate in enumerate(candidates):
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
        if most < float("inf") and candidate["loss"] is not None and mean[-1][0] < most:
            mean.append((most, candidate["loss"]))
            each = [
                [*points, (most, loss)]
                for points, loss in zip(each, candidate["losses"], strict=True)
            ]
        start = max(start, mean[0][1])
        lines.append(Curve(called(candidate), mean, each, style))
    return curves(
        lines, title=title, x_title=x_title, y_title="loss, nats per token", most=2 * start
    )


def _drawn(result: Found) -> list[Any]:
    """The source and the first candidates, as many as can be told apart."""
    source = _source(result)
    others = [each for each in _ranked(result) if not each["source"]]
    first = [source] if source["outcome"] == "ranked" else others[:1]
    return [*first, *(each for each in others if each not in first)][:MOST_LINES]


def _to_the_source(result: Found) -> str:
    source, rows = _source(result), []
    losses = {each["name"]: each["losses"] for each in _ranked(result)}
    for each in _ranked(result):
        pair = difference_between(result, each["name"], source["name"])
        if pair is None or each is source:
            continue
        ends = (pair["low"], pair["high"])
        sign = 1 if pair["worse"] == each["name"] else -1
        low, high = ends if sign > 0 else (-ends[1], -ends[0])
        seeds = [a - b for a, b in zip(losses[each["name"]], losses[source["name"]], strict=True)]
        mean = sign * pair["difference"]
        rows.append(Interval(each["name"], mean, low, high, seeds, pair["noise"]))
    title = "Against the source, trained further"
    chart = intervals(rows, title=title, x_title="loss − loss of the source, nats per token")
    return section(
        title,
        "At equal compute: what is left of zero is better than the source. Bars are intervals, "
        "grey where they hold zero, so that the difference may be noise; dots are the seeds.",
        framed(chart) if rows else "",
        half=True,
    )


def _pairs(result: Found) -> str:
    rows = [
        [
            pair["better"],
            pair["worse"],
            f"{nats(pair['difference'])}{', noise' if pair['noise'] else ''}",
            f"{nats(pair['low'])} to {nats(pair['high'])}",
        ]
        for pair in result["differences"]
    ]
    heads = ["lower loss", "higher loss", "higher by", "interval"]
    return section(
        "What is noise",
        "Every pair at equal compute: how much higher the loss of the second is, and the interval "
        f"of that. {result['rule']}",
        table(heads, rows, "htnn"),
    )


def _rates(result: Found) -> str:
    rates = [f"{rate:g}" for rate in result["lr"]]
    rows = [
        [each["name"], *("not finite" if loss is None else f"{loss:.4f}" for loss in each["by_lr"])]
        for each in result["candidates"]
        if each["by_lr"]
    ]
    return section(
        "By learning rate",
        "Loss at equal compute with every rate, which is that of the source; the order takes the "
        "best of each.",
        table(["rate", *rates], rows, "h" + "n" * len(rates)) if len(rates) > 1 else "",
    )


def _measured(result: Found) -> str:
    made = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    equal = result["equal_compute"]
    found = {
        "source": result["source"],
        "steps": result["steps"],
        "windows in a step": result["batch"],
        "tokens in a window": result["length"],
        "seeds": result["seeds"],
        "learning rates": ", ".join(f"{rate:g}" for rate in result["lr"]),
        "weight decay": f"{result['weight_decay']:g}",
        "warmup": f"{result['warmup']} steps, then constant",
        "equal compute": compute(equal) if equal is not None else None,
        "computed in": result["dtype"],
        "device": result["device"],
        "text": Path(str(result["text"])).name,
        "SHA-256 of text": result["text_sha256"],
        "tokens to train on": result["training_tokens"],
        "tokens held out": result["held_out_tokens"],
        "grown models": result["work"],
        "made": result["created"],
        "took": duration(result["seconds"]),
        "versions": made,
    }
    curves = [
        [
            f"{each['name']}, {curve['lr']:g}, seed {curve['seed']}",
            len(curve["steps"]),
            *_ends(curve),
        ]
        for each in result["candidates"]
        for curve in each["curves"]
    ]
    heads = ["training", "looks", "loss before", "loss at the end"]
    why = "".join(f"<li>{escape(each)}</li>" for each in why_not(result))
    return section(
        "How it was measured",
        "AdamW, by the law of updates for what was grown; all take the same windows in the same "
        "order for a seed, and begin without an optimizer’s state. Compute is counted in products "
        "of matrices, forward and back.",
        f"<p>Not ranked by their loss:</p><ul>{why}</ul>" if why else "",
        facts(found),
        more(f"All {len(curves):,} trainings", table(heads, curves, "hnnn")),
    )


def _ends(curve: Found) -> list[str]:
    return [figure(curve["losses"][at], ".4f") for at in (0, -1)]
