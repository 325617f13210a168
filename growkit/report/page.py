"""A proof as one HTML file that needs nothing else: no network, no script, light, dark and paper.

The page is a list of sections, each a function of the result. What the result does not hold is
left out with its heading. Everything that comes from files is escaped where it enters the markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from re import sub
from typing import Any

from growkit.report import drawing
from growkit.report.drawing import Bar
from growkit.report.markup import escape, facts, figure, framed, is_number, more, section, table
from growkit.results.sentences import trainability_sentence

Found = Mapping[str, Any]

PROMISES = {
    "exact": "the target is to compute the same function as the source",
    "bounded": "the target may differ from the source, by what is measured here",
    "different": "the target is to be another function; how far away is measured here",
}
MEASURES = (
    ("dtype", "dtype", "the number format both models ran in"),
    ("device", "device", "where they ran"),
    (
        "largest |Δlogit| / scale",
        "relative",
        "the largest change of a logit, against their usual size",
    ),
    ("limit", "tolerance", "what the line above must stay below, or none"),
    ("largest |Δlogit|", "max_abs_logit_diff", "the largest change of a logit"),
    ("mean |Δlogit|", "mean_abs_logit_diff", "the change of a logit on average"),
    ("logit scale", "logit_scale", "the usual size of the source's logits: root mean square"),
    ("KL, nats per token", "kl_nats_per_token", "how far predictions are apart; 0 if not at all"),
    ("top-1 agreement", "top1_agreement", "the share of tokens with the same likeliest next token"),
)
RECORDED = ("growkit", "created", "dtype", "source_parameters", "parameters", "bytes", "lost")
"""What the page takes from the manifest as it is."""

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
    parts = [_numbers, _loss, _difference, _layers, _modes, _logits, _positions, _copies, _low_rank]
    main = "".join(part(result) for part in [*parts, _measured]) + _manifest(manifest or {})
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
{_header(result, kind, verdict)}
<main>
{main}</main>
</body>
</html>
"""


def _verdict(result: Found) -> tuple[str, str]:
    """Its colour and its words."""
    promise, reason = result.get("promise"), str(result.get("reason"))
    if reason.startswith("no verdict"):
        return "warn", "No verdict"
    exact = promise == "exact"
    if not result.get("kept"):
        return "bad", "Not preserved" if exact else "Not as asked"
    return ("good", "Preserved") if exact else ("warn", f"{promise}, as asked for".capitalize())


def _header(result: Found, kind: str, verdict: str) -> str:
    reason = str(result.get("reason")).removeprefix(f"{verdict.lower()}: ")
    reason = escape(reason[:1].upper() + reason[1:])
    # Browsers would break a line after the hyphen of 1e-14.
    reason = sub(r"[\d.]+e-\d+", r'<span class="whole">\g<0></span>', reason)
    promise = str(result.get("promise"))
    meaning = f": {PROMISES[promise]}" if promise in PROMISES else ""
    sign = {"good": "✓", "warn": "!", "bad": "✗"}[kind]
    return (
        f'<header><div class="verdict {kind}"><h1><span aria-hidden="true">{sign}</span> '
        f'{escape(verdict)}</h1><p class="reason">{reason}.</p>'
        f"<p>Promise: <strong>{escape(promise)}</strong>{meaning}.</p></div>"
        f"{facts({key: result.get(key) for key in ('source', 'target')})}</header>"
    )


def _numbers(result: Found) -> str:
    strict, native = result.get("strict_float64") or {}, result.get("native") or {}
    why = strict.get("tolerance_why")
    rows = [
        (
            (label, f"{meaning} ({why})" if why and key == "tolerance" else meaning),
            strict.get(key),
            native.get(key),
        )
        for label, key, meaning in MEASURES
    ]
    recovered = result.get("weights_recovered")
    told = (
        "How the target was made is not known: the verdict rests on logits, and on what config, "
        "tokenizer and generation settings do."
    )
    if recovered is not None:
        does, are = ("give", "are") if recovered else ("do not give", "are not")
        told = f"The written weights {does} the source's back, every element, bit for bit."
        if result.get("promise") != "exact":
            told = f"The written weights {are} what the recipe makes of the source's."
    heads = ["", "strict float64", "as it runs"]
    return section("The numbers", told, table(heads, rows if strict or native else [], "hnn"))


def _loss(result: Found) -> str:
    before, after = result.get("loss_source"), result.get("loss_target")
    change = after - before if is_number(before) and is_number(after) else None
    row = [figure(before, ".9f"), figure(after, ".9f"), figure(change, "+.3g" if change else "g")]
    missing = before is None and after is None
    return section(
        "Loss before and after",
        "Mean negative log-likelihood in nats per token, in strict float64, over "
        f"{figure(result.get('predictions'))} predictions ({_text_name(result)}).",
        table(["before", "after", "change"], [] if missing else [row], "nnn"),
    )


def _difference(result: Found) -> str:
    fault = result.get("fault") or {}
    found = {
        "layer": _first(fault.get("layer"), result.get("first_differing_layer")),
        "component": fault.get("component"),
        "tensor": _first(fault.get("tensor"), result.get("first_lost_tensor")),
        "first difference": result.get("first_difference"),
        "likely cause": fault.get("cause"),
        "factor": fault.get("factor"),
        "changed files and keys": ", ".join(result.get("changed") or []) or None,
    }
    told = "The first module whose output is not the source's, and what is known of the reason."
    return section("Where and why it differs", told, facts(found))


def _layers(result: Found) -> str:
    layers = result.get("by_layer") or []
    tolerance = (result.get("strict_float64") or {}).get("tolerance")
    chart = drawing.line(
        [layer.get("relative") for layer in layers],
        title="Error by layer",
        x_title="layer",
        y_title="error / scale of the source's states",
        names=[str(layer["module"]).rpartition(".")[2] for layer in layers],
        log=True,
        limit=(tolerance, f"limit {tolerance:.3g}") if is_number(tolerance) else None,
    )
    return section(
        "Error by layer",
        "How far the hidden states are from the source's after each module, in strict float64. "
        "A fault shows as a step, rounding grows slowly.",
        framed(chart) if layers else "",
    )


def _modes(result: Found) -> str:
    rows = [
        [
            (mode["name"], mode.get("note") or ""),
            {True: "✓ kept", False: "✗ not kept"}.get(mode.get("kept"), "no limit"),
            mode.get("relative"),
            mode.get("tolerance"),
            mode.get("native"),
            mode.get("native_tolerance"),
        ]
        for mode in result.get("modes") or []
    ]
    heads = ["way of asking", "verdict", "strict", "limit", "as it runs", "limit"]
    told = (
        "Largest difference of a logit, relative to their scale, in every way that models are used."
    )
    return section("How it was run", told, table(heads, rows, "hvnnnn"))


def _logits(result: Found) -> str:
    sample = result.get("logit_sample") or []
    title = "Logits, source against target"
    return section(
        title,
        f"{len(sample):,} logits as the models run. On the diagonal both say the same; the "
        "rounding of the dtype spreads them around it.",
        framed(drawing.scatter(sample, title=title, x_title="source", y_title="target"))
        if sample
        else "",
    )


def _positions(result: Found) -> str:
    values = result.get("kl_by_position") or []
    title = "KL by position"
    chart = drawing.line(values, title=title, x_title="position in the window", y_title="KL, nats")
    return section(
        title,
        "How far the predicted distributions are apart, by the number of tokens before. A slope "
        "means that an error accumulates with the context.",
        framed(chart) if values else "",
    )


def _copies(result: Found) -> str:
    found, matrices = result.get("trainability"), result.get("symmetry") or []
    sentence = trainability_sentence(found) if found else ""
    distances: dict[str, list[float]] = {}
    for matrix in matrices:
        if is_number(matrix.get("relative_distance")):
            kind = sub(r"\.\d+\.", ".*.", str(matrix["tensor"]))
            distances.setdefault(kind, []).append(matrix["relative_distance"])
    chart = drawing.bars(
        [Bar(kind, sum(d) / len(d), min(d), max(d)) for kind, d in distances.items()],
        title="Distance between copies, by matrix",
        x_title="relative distance between copies",
    )
    keys = ("tensor", "copies", "relative_distance", "effective_rank_gain")
    heads = ["tensor", "copies", "relative distance", "gain of effective rank"]
    rows = [[matrix.get(key) for key in keys] for matrix in matrices]
    return section(
        "Can the new capacity train?",
        "Copies learn different things if their gradients differ. Bars show how far the copies of "
        "a matrix are apart, relative to their size: the mean over layers, with a line from the "
        "smallest to the largest."
        if distances
        else "Copies learn different things if their gradients differ.",
        f"<p>{escape(sentence[:1].upper() + sentence[1:])}.</p>" if sentence else "",
        framed(chart) if distances else "",
        more(f"All {len(rows):,} matrices", table(heads, rows, "cnnn")),
    )


def _low_rank(result: Found) -> str:
    by_rank, spectra = result.get("kl_by_rank") or [], result.get("spectra") or []
    charts = []
    if by_rank:
        chart = drawing.line(
            [point.get("kl_nats_per_token") for point in by_rank],
            title="KL by rank",
            x_title="rank",
            y_title="KL, nats per token",
            names=[str(point["rank"]) for point in by_rank],
            log=True,
        )
        charts.append(framed(chart, "KL by rank", "what another rank would cost or gain"))
    drawn = [found for found in spectra if found.get("singular_values")]
    drawn.sort(
        key=lambda found: found.get("residual") if is_number(found.get("residual")) else math.inf
    )
    for found in drawn[: -MOST_SPECTRA - 1 : -1]:
        values, kept = found["singular_values"], found.get("kept")
        chart = drawing.line(
            values,
            title=f"Singular values of {found['module']}",
            x_title="index",
            y_title="singular value",
            names=[str(index + 1) for index in range(len(values))],
            log=True,
            mark=(kept - 0.5, f"rank {found.get('rank')}") if is_number(kept) else None,
        )
        note = f"residual {figure(found.get('residual'))} {found.get('unit') or ''}"
        charts.append(framed(chart, found["module"], note))
    rows = [[found.get(key) for key in ("module", "rank", "residual", "unit")] for found in spectra]
    return section(
        "What the low rank holds",
        "A low-rank step keeps the singular values on the left of the dashed line and loses the "
        f"rest; the residual says how much. Drawn are the largest, at most {MOST_SPECTRA}."
        if spectra
        else "",
        f'<div class="charts">{"".join(charts)}</div>' if charts else "",
        more(f"All {len(rows):,} modules", table(["module", "rank", "residual", ""], rows, "cnnt")),
    )


def _measured(result: Found) -> str:
    caught = "caught" if result.get("negative_control_caught") else "NOT caught"
    control = result.get("negative_control")
    made = ", ".join(f"{name} {value}" for name, value in (result.get("versions") or {}).items())
    found = {
        "tokens": result.get("tokens"),
        "predictions": result.get("predictions"),
        "text": _text_name(result),
        "SHA-256 of text": result.get("text_sha256"),
        "seed": result.get("seed"),
        "device": (result.get("native") or {}).get("device"),
        "negative control": f"{control}: {caught}" if control else None,
        "versions": made or None,
    }
    found["not covered"] = "; ".join(result.get("notes") or []) or None
    found["unknown files"] = ", ".join(result.get("unknown_files") or []) or None
    told = "The negative control is a deliberate fault; a proof that misses it says nothing."
    return section("How it was measured", told, facts(found))


def _manifest(manifest: Found) -> str:
    """What a manifest says, as far as it has the form that growkit gives it."""
    recipe, papers, hashes = (manifest.get(k) for k in ("recipe", "papers", "source_files"))
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    listed = (
        [each for each in steps if isinstance(each, Mapping)] if isinstance(steps, list) else []
    )
    told = [", ".join(f"{key} {value}" for key, value in step.items()) for step in listed]
    found = {key.replace("_", " "): manifest.get(key) for key in RECORDED}
    names = [str(paper) for paper in papers] if isinstance(papers, list) else []
    found["papers"] = "; ".join(dict.fromkeys(names)) or None
    items = list(hashes.items()) if isinstance(hashes, Mapping) else []
    inside = "".join(f"<li><code>{escape(step)}</code></li>" for step in told)
    inside = f"<ol>{inside}</ol>" if told else ""
    inside += facts(found) + table(["source file", "SHA-256"], items, "cc")
    text = "From the manifest beside the weights, growkit.json."
    return section("How it was made", text, more("Recipe and source files", inside))


def _text_name(result: Found) -> str:
    return Path(str(result["text"])).name if result.get("text") else "random tokens"


def _first(*values: Any) -> Any:
    """The first that is there; a layer 0 is."""
    return next((value for value in values if value is not None), None)
