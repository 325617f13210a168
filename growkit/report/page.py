"""A proof as one HTML file that needs nothing else: no network, no script, light, dark and paper.

The page is a list of sections, each a function of the result. What the result does not hold is
left out with its heading. Everything that comes from files is escaped where it enters the markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from re import sub
from typing import Any

from growkit.report import drawing
from growkit.report.drawing import Bar, escape, figure, is_number
from growkit.report.sentences import trainability_sentence

Found = Mapping[str, Any]

PROMISES = {
    "exact": "the target computes the same function as the source",
    "bounded": "the target differs from the source, by a distance that was measured",
    "different": "the target is another function, as asked for; the distance was measured",
}
MEASURES = (
    ("dtype", "dtype", "the number format both models were run in"),
    ("device", "device", "where they were run"),
    (
        "largest |Δlogit| / scale",
        "relative",
        "the largest change of any logit, relative to their usual size; the verdict rests on it",
    ),
    ("limit", "tolerance", "what the line above must stay below; none if it is held to no limit"),
    ("largest |Δlogit|", "max_abs_logit_diff", "the largest change of any logit"),
    ("mean |Δlogit|", "mean_abs_logit_diff", "the change of a logit on average"),
    ("logit scale", "logit_scale", "the usual size of the source's logits (root mean square)"),
    (
        "KL, nats per token",
        "kl_nats_per_token",
        "how far the predicted distributions are apart; 0 if they are the same",
    ),
    (
        "top-1 agreement",
        "top1_agreement",
        "the share of tokens for which both models rank the same next token first",
    ),
)
MOST_SPECTRA = 4
"""Spectra that are drawn; the others are in a table."""


def report_page(result: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> str:
    """The report of a proof.

    Args:
        result: a ``growkit.proof.VerifyResult``; what is missing or null is left out.
        manifest: the target's ``growkit.json``, if there is one.

    Returns:
        The HTML file.
    """
    style = drawing.style_rules() + Path(__file__).with_name("page.css").read_text("utf-8")
    kind, verdict = _verdict(result)
    names = [Path(str(result.get(key))).name for key in ("source", "target")]
    body = [
        _header(result, kind, verdict),
        "<main>",
        _numbers(result),
        _loss(result),
        _difference(result),
        _layers(result),
        _modes(result),
        _logits(result),
        _positions(result),
        _copies(result),
        _low_rank(result),
        _measured(result),
        _manifest(manifest or {}),
        "</main>",
    ]
    # The policy makes "no network" a fact that the browser enforces, whatever files contain.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(verdict)}: {escape(" → ".join(names))} – growkit</title>
<style>
{style}</style>
</head>
<body>
{"".join(body)}
</body>
</html>
"""


def _verdict(result: Found) -> tuple[str, str]:
    """Its colour and its words."""
    promise, reason = result.get("promise"), str(result.get("reason"))
    if reason.startswith("no verdict"):
        return "warn", "No verdict"
    if promise == "exact":
        return ("good", "Preserved") if result.get("kept") else ("bad", "Not preserved")
    return (
        ("warn", f"{promise}, as asked".capitalize()) if result.get("kept") else ("bad", "Failed")
    )


def _header(result: Found, kind: str, verdict: str) -> str:
    reason = str(result.get("reason")).removeprefix(f"{verdict.lower()}: ")
    promise = str(result.get("promise"))
    meaning = f": {PROMISES[promise]}" if promise in PROMISES else ""
    sign = {"good": "✓", "warn": "!", "bad": "✗"}[kind]
    return (
        f'<header><div class="verdict {kind}"><h1><span aria-hidden="true">{sign}</span> '
        f'{escape(verdict)}</h1><p class="reason">{escape(reason[:1].upper() + reason[1:])}.</p>'
        f"<p>Promise: <strong>{escape(promise)}</strong>{meaning}.</p></div>"
        f"{_facts([('source', result.get('source')), ('target', result.get('target'))])}</header>"
    )


def _numbers(result: Found) -> str:
    strict, native = result.get("strict_float64") or {}, result.get("native") or {}
    if not strict and not native:
        return ""
    rows = []
    for label, key, meaning in MEASURES:
        why = strict.get("tolerance_why") if key == "tolerance" else None
        small = f'<span class="small">{escape(f"{meaning}: {why}" if why else meaning)}</span>'
        rows.append(
            [escape(label) + small, *(escape(figure(side.get(key))) for side in (strict, native))]
        )
    recovered = result.get("weights_recovered")
    told = "How the target was made is not known: the verdict rests on logits alone."
    if recovered is not None:
        does = "give" if recovered else "do not give"
        told = f"The written weights {does} the source's back, every element, bit for bit."
    table = _table(["", "strict float64", "as it runs"], rows, "hnn")
    return _section("The numbers", f"<p>{told}</p>{table}")


def _loss(result: Found) -> str:
    before, after = result.get("loss_source"), result.get("loss_target")
    if before is None and after is None:
        return ""
    change = after - before if is_number(before) and is_number(after) else None
    return _section(
        "Loss before and after",
        "<p>Mean negative log-likelihood in nats per token, strict float64, over "
        f"{escape(figure(result.get('predictions')))} predictions "
        f"({escape(_text_name(result))}).</p>",
        _table(
            ["before", "after", "change"],
            [[escape(figure(before, ".9f")), escape(figure(after, ".9f")), figure(change, "+.3g")]],
            "nnn",
        ),
    )


def _difference(result: Found) -> str:
    fault = result.get("fault") or {}
    facts = [
        ("layer", _first(fault.get("layer"), result.get("first_differing_layer"))),
        ("component", fault.get("component")),
        ("tensor", _first(fault.get("tensor"), result.get("first_lost_tensor"))),
        ("first module whose output differs", result.get("first_difference")),
        ("likely cause", fault.get("cause")),
        ("factor", fault.get("factor")),
    ]
    return _section("Where and why it differs", _facts(facts))


def _layers(result: Found) -> str:
    layers = result.get("by_layer") or []
    if not layers:
        return ""
    tolerance = (result.get("strict_float64") or {}).get("tolerance")
    chart = drawing.line(
        [layer["relative"] for layer in layers],
        title="Error by layer",
        x_title="layer",
        y_title="error / scale of the source's states",
        names=[str(layer["module"]).rpartition(".")[2] for layer in layers],
        log=True,
        limit=(tolerance, f"limit {tolerance:.3g}") if is_number(tolerance) else None,
    )
    return _section(
        "Error by layer",
        "<p>How far the hidden states are from the source's, after each module, in strict "
        "float64. A fault shows as a step; rounding grows slowly.</p>",
        _figure(chart),
    )


def _modes(result: Found) -> str:
    rows = [
        [
            escape(mode["name"]),
            escape(figure(mode.get("relative"))),
            escape(figure(mode.get("tolerance"))),
            {True: "✓ kept", False: "✗ not kept"}.get(mode.get("kept"), "no limit"),
            escape(mode.get("note") or ""),
        ]
        for mode in result.get("modes") or []
    ]
    if not rows:
        return ""
    heads = ["way of running", "largest / scale", "limit", "", "note"]
    return _section(
        "How it was run",
        "<p>The same comparison in the ways in which models are used.</p>",
        _table(heads, rows, "hnnvt"),
    )


def _logits(result: Found) -> str:
    sample = result.get("logit_sample") or []
    if not sample:
        return ""
    chart = drawing.scatter(
        sample, title="Logits of source and target", x_title="source", y_title="target"
    )
    text = (
        f"<p>{len(sample):,} logits as the models run. On the diagonal, both say the same; the "
        "storage dtype's rounding spreads them around it.</p>"
    )
    return _section("Logits, source against target", text, _figure(chart))


def _positions(result: Found) -> str:
    values = result.get("kl_by_position") or []
    if not values:
        return ""
    chart = drawing.line(
        values, title="KL by position", x_title="position in the window", y_title="KL, nats"
    )
    return _section(
        "KL by position",
        "<p>How far the predicted distributions are apart, by the number of tokens before. A "
        "slope means that an error accumulates with the context.</p>",
        _figure(chart),
    )


def _copies(result: Found) -> str:
    found, matrices = result.get("trainability"), result.get("symmetry") or []
    sentence = trainability_sentence(found) if found else ""
    parts = [f"<p>{escape(sentence[:1].upper() + sentence[1:])}.</p>"] if found else []
    known = [matrix for matrix in matrices if is_number(matrix.get("relative_distance"))]
    if known:
        kinds = groupby(sorted(known, key=_kind), key=_kind)
        chart = drawing.bars(
            [
                _bar(kind, [matrix["relative_distance"] for matrix in group])
                for kind, group in kinds
            ],
            title="Distance between copies, by matrix",
            x_title="relative distance between copies",
        )
        parts.append(
            "<p>How far the copies of a matrix are apart, relative to their size: the mean over "
            "layers, with a line from the smallest to the largest. Copies at 0 are equal.</p>"
        )
        parts.append(_figure(chart))
    rows = [
        [
            f"<code>{escape(matrix['tensor'])}</code>",
            *(
                escape(figure(matrix.get(key)))
                for key in ("copies", "relative_distance", "effective_rank_gain")
            ),
        ]
        for matrix in matrices
    ]
    heads = ["tensor", "copies", "relative distance", "gain of effective rank"]
    parts.append(_more(f"All {len(rows):,} matrices", _table(heads, rows, "hnnn")))
    return _section("Can the new capacity train?", *parts)


def _kind(matrix: Found) -> str:
    """A tensor's name without the number of its layer."""
    return sub(r"\.\d+\.", ".*.", str(matrix["tensor"]))


def _bar(kind: str, values: Sequence[float]) -> Bar:
    return Bar(kind, sum(values) / len(values), min(values), max(values))


def _low_rank(result: Found) -> str:
    spectra, by_rank = result.get("spectra") or [], result.get("kl_by_rank") or []
    charts = []
    if by_rank:
        chart = drawing.line(
            [point["kl_nats_per_token"] for point in by_rank],
            title="KL by rank",
            x_title="rank",
            y_title="KL, nats per token",
            names=[str(point["rank"]) for point in by_rank],
            log=True,
        )
        charts.append(_figure(chart, "KL by rank", "what a higher rank would gain"))
    worst = sorted(spectra, key=lambda found: -_order(found["residual"]))
    for found in worst[:MOST_SPECTRA]:
        values = found["singular_values"]
        chart = drawing.line(
            values,
            title=f"Singular values of {found['module']}",
            x_title="index",
            y_title="singular value",
            names=[str(index + 1) for index in range(len(values))],
            log=True,
            mark=(found["rank"] - 0.5, f"rank {found['rank']}"),
        )
        charts.append(_figure(chart, found["module"], f"residual {_residual(found)}"))
    rows = [
        [f"<code>{escape(found['module'])}</code>", figure(found["rank"]), escape(_residual(found))]
        for found in spectra
    ]
    text = (
        "<p>A low-rank step keeps what is left of the dashed line and loses the rest; the residual "
        f"says how much that is. The {len(worst[:MOST_SPECTRA])} largest residuals are drawn.</p>"
    )
    return _section(
        "What the low rank holds",
        text if spectra else "",
        f'<div class="charts">{"".join(charts)}</div>' if charts else "",
        _more(f"All {len(rows):,} modules", _table(["module", "rank", "residual"], rows, "hnn")),
    )


def _order(value: Any) -> float:
    """To sort by, with what is no number first, as the worst."""
    return value if is_number(value) else drawing.BEYOND


def _residual(found: Found) -> str:
    return f"{figure(found['residual'])} {found.get('unit') or ''}".strip()


def _measured(result: Found) -> str:
    caught = result.get("negative_control_caught")
    control = f"{result.get('negative_control')}: {'caught' if caught else 'NOT caught'}"
    made = ", ".join(f"{name} {value}" for name, value in (result.get("versions") or {}).items())
    return _section(
        "How it was measured",
        _facts(
            [
                ("tokens", result.get("tokens")),
                ("predictions", result.get("predictions")),
                ("text", _text_name(result)),
                ("SHA-256 of the text", result.get("text_sha256")),
                ("seed", result.get("seed")),
                ("negative control", control if result.get("negative_control") else None),
                ("versions", made or None),
            ]
        ),
    )


def _text_name(result: Found) -> str:
    return Path(str(result["text"])).name if result.get("text") else "random tokens"


def _manifest(manifest: Found) -> str:
    recipe = manifest.get("recipe") or {}
    steps = [", ".join(f"{k} {v}" for k, v in step.items()) for step in recipe.get("steps") or []]
    facts = [
        (name, manifest.get(key))
        for name, key in (
            ("made with growkit", "growkit"),
            ("created", "created"),
            ("dtype", "dtype"),
            ("parameters before", "source_parameters"),
            ("parameters after", "parameters"),
            ("bytes", "bytes"),
            ("what is lost", "lost"),
        )
    ]
    hashes = [
        [f"<code>{escape(name)}</code>", f"<code>{escape(digest)}</code>"]
        for name, digest in (manifest.get("source_files") or {}).items()
    ]
    listed = "".join(f"<li><code>{escape(step)}</code></li>" for step in steps)
    papers = "".join(f"<li>{escape(paper)}</li>" for paper in manifest.get("papers") or [])
    inside = [
        f"<h3>Steps</h3><ol>{listed}</ol>" if steps else "",
        f"<h3>Papers</h3><ul>{papers}</ul>" if papers else "",
        _facts(facts),
        _table(["source file", "SHA-256"], hashes, "ht"),
    ]
    return _section("How it was made", _more("Recipe and source files", "".join(inside)))


def _first(*values: Any) -> Any:
    """The first that is there; a layer 0 is."""
    return next((value for value in values if value is not None), None)


def _section(title: str, *parts: str) -> str:
    """A section, if there is anything in it."""
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>\n" if any(parts) else ""


def _facts(facts: Iterable[tuple[str, Any]]) -> str:
    """Names and what they are; what is missing is left out."""
    rows = "".join(
        f"<dt>{name}</dt><dd>{escape(figure(value))}</dd>"
        for name, value in facts
        if value is not None
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _figure(chart: str, name: str = "", note: str = "") -> str:
    caption = f'{escape(name)}<span class="small">{escape(note)}</span>'
    return f"<figure>{f'<figcaption>{caption}</figcaption>' if name else ''}{chart}</figure>"


def _more(summary: str, inside: str) -> str:
    return f"<details><summary>{summary}</summary>{inside}</details>" if inside else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kinds: str) -> str:
    """A table of markup; a kind per column: its head, a number, a verdict or text."""
    if not rows:
        return ""
    aligned = [' class="number"' if kind == "n" else "" for kind in kinds]
    top = "".join(
        f'<th scope="col"{align}>{head}</th>' for head, align in zip(heads, aligned, strict=True)
    )
    lines = []
    for row in rows:
        cells = []
        for cell, kind, align in zip(row, kinds, aligned, strict=True):
            colour = {"✓": ' class="good"', "✗": ' class="bad"'}.get(cell[:1], "")
            shown = colour if kind == "v" else align
            cells.append(
                f'<th scope="row">{cell}</th>' if kind == "h" else f"<td{shown}>{cell}</td>"
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    # A box that scrolls must be reachable by keyboard.
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
