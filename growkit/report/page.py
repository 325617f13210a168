"""A proof as one HTML file that needs nothing else: no network, no script, light, dark and paper.

The page is a list of sections, each a function of the result. What the result does not hold is
left out with its heading. Everything that comes from files is escaped where it enters the markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import sub
from typing import Any

from growkit.base.units import duration
from growkit.report import drawing
from growkit.report.document import document
from growkit.report.drawing import Bar
from growkit.report.header import Found, header, verdict_of
from growkit.report.low_rank import low_rank
from growkit.report.markup import (
    NOTHING,
    begun,
    escape,
    facts,
    figure,
    flowing,
    framed,
    is_number,
    more,
    section,
    table,
)
from growkit.report.summary import native_name, predictions, text_name
from growkit.results.advice import value_sentence
from growkit.results.sentences import NOT_TRIED, recovered_sentence, trainability_sentence

MOST_BINS = 16


@dataclass(frozen=True)
class Bin:
    """Neighbouring positions.

    Attributes:
        name: the first and the last of them.
        mean: over all of their tokens; None if a position has no number.
        tokens: how many these are.
    """

    name: str
    mean: float | None
    tokens: int


def binned(values: Sequence[float | None], counts: Sequence[int]) -> list[Bin]:
    """Positions in at most ``MOST_BINS`` bins of equal width, but for the last.

    Args:
        values: the mean at each position.
        counts: tokens at each position; one each if left empty.
    """
    width = 1
    while len(values) > MOST_BINS * width:
        width *= 2
    counts = counts or [1] * len(values)
    found = []
    for begin in range(0, len(values), width):
        inside, sizes = values[begin : begin + width], counts[begin : begin + width]
        last, tokens = begin + len(inside) - 1, sum(sizes)
        # What is no number must not disappear in a mean.
        known = [value for value in inside if is_number(value)]
        mean = None
        if tokens and len(known) == len(inside):
            mean = sum(v * (n / tokens) for v, n in zip(known, sizes, strict=False))
        found.append(Bin(str(begin) if last == begin else f"{begin}–{last}", mean, tokens))
    return found


MEASURES = (
    ("dtype", "dtype", "the number format both models ran in"),
    ("device", "device", "where they ran"),
    (
        "largest |Δlogit| / scale",
        "relative",
        "the largest change of a logit, against their usual size",
    ),
    ("limit", "tolerance", "what the line above must not exceed, or none"),
    ("largest |Δlogit|", "max_abs_logit_diff", "the largest change of a logit"),
    ("mean |Δlogit|", "mean_abs_logit_diff", "the change of a logit on average"),
    ("logit scale", "logit_scale", "the usual size of the source's logits: root mean square"),
    ("KL, nats per token", "kl_nats_per_token", "how far predictions are apart; 0 if not at all"),
    ("top-1 agreement", "top1_agreement", "the share of tokens with the same likeliest next token"),
)
RECORDED = (
    *("growkit", "created", "dtype", "source_parameters", "parameters", "bytes", "lost"),
    "loads_with",
)
"""What the page takes from the manifest as it is."""

BARS = (
    "Bars show how far the copies of a matrix are apart, relative to their size: the mean over "
    "layers, with a line from the smallest to the largest."
)
"""What the distances between copies are."""


def report_page(result: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> str:
    """The report of a proof.

    Args:
        result: a ``growkit.VerifyResult``; what is missing or null is left out.
        manifest: the target's ``growkit.json``, if there is one.

    Returns:
        The HTML file.
    """
    names = [Path(str(result.get(key))).name for key in ("source", "target")]
    parts = [_difference, _numbers, _loss, _modes, _layers, _logits, _positions, _copies, low_rank]
    main = "".join(part(result) for part in [*parts, _measured]) + _manifest(manifest or {})
    title = f"{verdict_of(result)[1]}: {' → '.join(names)}"
    return document(title, header(result, manifest or {}, _steps(manifest or {})), main)


def _numbers(result: Found) -> str:
    columns = [result.get(key) or {} for key in ("strict_float64", "native", "rounding")]
    why = columns[0].get("tolerance_why")
    rows = [
        (
            (label, f"{meaning} ({why})" if why and key == "tolerance" else meaning),
            *(column.get(key) for column in columns),
        )
        for label, key, meaning in MEASURES
    ]
    recovered = result.get("weights_recovered")
    told = (
        "How the target was made is not known: the verdict rests on logits, and on what config, "
        "tokenizer and generation settings do."
    )
    if recovered is not None:
        told = (
            _recovered(result)
            if recovered
            else "Some of the source's weights cannot be read off the written ones."
        )
        if result.get("promise") != "exact":
            are = "are" if recovered else "are not"
            told = f"The written weights {are} what the recipe makes of the source's."
    if columns[2]:
        told += (
            f" The last column is what {columns[2].get('dtype')} does to the source alone, against "
            "itself in strict float64: what is as large there is rounding, and no fault of the "
            "target."
        )
    heads = ["", "strict float64", native_name(result), "source's own rounding"]
    return section("The numbers", told, table(heads, rows if any(columns[:2]) else [], "hnnn"))


def _recovered(result: Found) -> str:
    """What of the source's weights the written ones give back, where nothing is lost."""
    found, every = result.get("tensors_recovered"), result.get("source_tensors")
    if found is None or every is None or found == every:
        return "The written weights give the source's back, every element, bit for bit."
    return f"{recovered_sentence(found, every)}."


def _loss(result: Found) -> str:
    rows = []
    for name, ending, form in (
        ("in strict float64", "", ".9f"),
        (native_name(result), "_native", ".6f"),
    ):
        before, after = (result.get(f"loss_{of}{ending}") for of in ("source", "target"))
        if before is None and after is None:
            continue
        change = after - before if is_number(before) and is_number(after) else None
        rows.append(
            [
                name,
                figure(before, form),
                figure(after, form),
                figure(change, "+.3g" if change else "g"),
            ]
        )
    return section(
        "Loss before and after",
        "Mean negative log-likelihood in nats per token, over "
        f"{predictions(result)} ({text_name(result)}).",
        table(["", "before", "after", "change"], rows, "hnnn"),
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
    for values in result.get("changed_values") or []:
        found[escape(values["name"])] = value_sentence(values)
    told = "The first module whose output is not the source's, and what is known of the reason."
    return section("Where and why it differs", told, facts(found))


def _layers(result: Found) -> str:
    layers = result.get("by_layer") or []
    tolerance = (result.get("strict_float64") or {}).get("tolerance")
    errors = [layer.get("relative") for layer in layers]
    told = (
        "How far the hidden states are from the source's after each module, in strict float64. "
        "A fault shows as a step, rounding grows slowly."
    )
    if result.get("promise") in ("bounded", "different"):
        told = (
            "How far the hidden states are from the source's after each module, in strict "
            "float64: a step shows where much of the difference comes from."
        )
    chart = drawing.line(
        errors,
        title="Error by layer",
        x_title="layer",
        y_title="error / scale of the source's states",
        names=[str(layer["module"]).rpartition(".")[2] for layer in layers],
        log=True,
        limit=(tolerance, f"limit {tolerance:.3g}") if is_number(tolerance) else None,
    )
    return section(
        "Error by layer",
        told,
        _unless_zero(errors, "Every hidden state is identical to the source's.", chart),
        half=True,
    )


def _unless_zero(values: Sequence[Any], told: str, chart: str) -> str:
    """A chart; a sentence where all that it would show is zero, and nothing where it is empty."""
    if not values:
        return ""
    return framed(chart) if any(value != 0 for value in values) else f"<p>{told}</p>"


def _modes(result: Found) -> str:
    modes = result.get("modes") or []
    columns = ("relative", "tolerance"), ("native", "native_tolerance")
    rows = [
        [
            (mode["name"], mode.get("note") or ""),
            _kept(mode),
            *(cell for pair in columns for cell in _measured_in(mode, *pair)),
        ]
        for mode in modes
    ]
    heads = ["inference mode", "verdict", "strict", "limit", native_name(result), "its limit"]
    told = (
        "Largest difference of a logit, relative to their scale, in every inference mode; – where "
        "no logits were compared."
    )
    return section("Inference modes", told, table(heads, rows, "hvnnnn"))


def _measured_in(mode: Found, measured: str, limit: str) -> list[Any]:
    """A difference and its limit, of which there may be none where there is a difference."""
    value, most = mode.get(measured), mode.get(limit)
    if value is None and most is None:
        return [NOTHING, NOTHING]
    return [value, "no limit" if most is None else most]


def _kept(mode: Found) -> str:
    if str(mode.get("note")).startswith(NOT_TRIED):
        return "not tried"
    words: dict[Any, str] = {True: "✓ kept", False: "✗ not kept"}
    return words.get(mode.get("kept"), "no limit")


def _logits(result: Found) -> str:
    sample = result.get("logit_sample") or []
    rounding = result.get("rounding") or {}
    largest, title = rounding.get("max_abs_logit_diff"), "Logits, source against target"
    name = "largest rounding of the source alone"
    chart = drawing.residuals(
        sample,
        title=title,
        x_title="logit of the source",
        y_title="target − source",
        band=(largest, name) if is_number(largest) else None,
    )
    return section(
        title,
        f"How far {len(sample):,} logits of the target are above or below the source's, "
        f"{native_name(result)}. "
        + (
            "What lies outside of the dashed lines is more than rounding."
            if result.get("promise") in ("bounded", "different")
            else "Rounding spreads them evenly around zero, whatever the logit; a slope or a shift "
            "is a fault."
        ),
        framed(chart) if sample else "",
        half=True,
    )


def _positions(result: Found) -> str:
    values, counts = result.get("kl_by_position") or [], result.get("tokens_by_position") or []
    title = "KL by position"
    found = binned(values, counts)
    chart = drawing.line(
        [each.mean for each in found],
        title=title,
        x_title="position in the window",
        y_title="KL, nats per token",
        names=[each.name for each in found],
    )
    told = "How far the predicted distributions are apart, by the number of tokens before."
    if found and counts:
        sizes = sorted({each.tokens for each in found[:-1] or found})
        between = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        told += f" Each point is the mean of {between} tokens."
    rows = [[each.name, each.tokens if counts else None, each.mean] for each in found]
    return section(
        title,
        f"{told} A slope means that an error accumulates with the context.",
        _unless_zero(values, "At every position predictions are identical to the source's.", chart),
        more("All positions", table(["positions", "tokens", "KL, nats per token"], rows, "hnn")),
        half=True,
    )


def _copies(result: Found) -> str:
    found, matrices = result.get("trainability"), result.get("symmetry") or []
    sentence = trainability_sentence(found).removeprefix("new capacity: ") if found else ""
    copied = bool(matrices or (found and found.get("copied")))
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
        " ".join(
            [
                *(["Copies learn different things if their gradients differ."] if copied else []),
                *([BARS] if distances else []),
            ]
        ),
        f"<p>{begun(sentence)}.</p>" if sentence else "",
        _unless_zero(
            [each for of_kind in distances.values() for each in of_kind],
            "All copies of a matrix get the same gradient: they are 0 apart.",
            chart,
        ),
        more(f"All {len(rows):,} matrices", table(heads, rows, "cnnn")),
        half=True,
    )


def _measured(result: Found) -> str:
    caught = "caught" if result.get("negative_control_caught") else "NOT caught"
    control = result.get("negative_control")
    made = ", ".join(f"{name} {value}" for name, value in (result.get("versions") or {}).items())
    found = {
        "tokens": result.get("tokens"),
        "predictions": result.get("predictions"),
        "text": text_name(result),
        "SHA-256 of text": result.get("text_sha256"),
        "seed": result.get("seed"),
        "made": result.get("created"),
        "took": duration(result["seconds"]) if is_number(result.get("seconds")) else None,
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
    papers, hashes = (manifest.get(key) for key in ("papers", "source_files"))
    told = _steps(manifest)
    found = {key.replace("_", " "): manifest.get(key) for key in RECORDED}
    names = [str(paper) for paper in papers] if isinstance(papers, list) else []
    found["papers"] = "; ".join(dict.fromkeys(names)) or None
    items = list(hashes.items()) if isinstance(hashes, Mapping) else []
    inside = "".join(f"<li><code>{flowing(step)}</code></li>" for step in told)
    inside = f"<ol>{inside}</ol>" if told else ""
    inside += facts(found) + table(["source file", "SHA-256"], items, "cc")
    text = "From the manifest beside the weights, growkit.json."
    return section("How it was made", text, more("Recipe and source files", inside))


def _steps(manifest: Found) -> list[str]:
    """How the target was made, a text for each step."""
    recipe = manifest.get("recipe")
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    listed = steps if isinstance(steps, list) else []
    return [
        ", ".join(f"{key} {value}" for key, value in step.items())
        for step in listed
        if isinstance(step, Mapping)
    ]


def _first(*values: Any) -> Any:
    """The first that is there; a layer 0 is."""
    return next((value for value in values if value is not None), None)
