"""The view of a proof."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from re import sub
from statistics import fmean
from sys import float_info
from typing import Any

from growkit.base.units import size
from growkit.report import drawing, view
from growkit.report.drawing import Interval, Titles
from growkit.report.engine_page import engine_topics
from growkit.report.view import (
    Cell,
    Found,
    Grid,
    Paragraph,
    Topic,
    duration,
    figure,
    is_finite,
    next_step,
    recorded,
)
from growkit.results.proof_result import (
    counted,
    failed,
    findings_of,
    notes_of,
    value_sentence,
)

MEASURES = (
    ("dtype", "dtype", "the number format both models ran in"),
    ("device", "device", "where they ran"),
    ("largest |Δlogit|", "max_abs_logit_diff", "the largest change of a logit"),
    ("mean |Δlogit|", "mean_abs_logit_diff", "the change of a logit on average"),
    ("logit scale", "logit_scale", "the usual size of the source's logits: root mean square"),
    ("largest / scale", "relative", "the largest change, relative to the usual size"),
    ("limit", "tolerance", "what the line above must not exceed, or none"),
    ("KL, nats per token", "kl_nats_per_token", "how far predictions are apart; 0 if not at all"),
    ("top-1 agreement", "top1_agreement", "the share of tokens with the same likeliest next token"),
)
RECORDED = (
    *("growkit", "created", "dtype", "source_parameters", "parameters", "bytes", "lost"),
    *("loads_with", "papers"),
)
"""Keys of the manifest that a page shows unchanged."""

CONDITIONS = (
    *("source", "target", "tokens", "predictions", "text", "text_sha256", "seed", "created"),
    *("seconds", "negative_control", "negative_control_caught", "versions", "notes"),
    "unknown_files",
)
"""Keys of the result and its sections that a page shows unchanged."""

SHOWN = ("weights", "files", "logits", "modes", "trainability", "training", "device")
"""Sections whose figures have tables, drawings and cells of their own."""

KEPT = {False: "not kept", True: "kept", None: "no limit"}
"""Words for findings; the first that applies to one of a section's findings is shown."""

MAX_BINS = 16
MAX_SPECTRA = 4
"""Largest number of drawn spectra; the table lists all of them."""

FAR = 1e6
"""Multiple of the limit above which the exact number does not matter."""


def figures_of(result: Found) -> dict[str, Any]:
    """The figures of a result and of all its sections that have drawings or tables, by name."""
    of, training = result["sections"], result["sections"]["training"]
    figures = {**(of["trainability"] or {"symmetry": ()}), **of["weights"], **of["files"]}
    figures |= {**of["logits"], **of["modes"], **result, "notes": notes_of(result)}
    return {**figures, "trainability": of["trainability"], "training": training}


def others_of(result: Found) -> dict[str, Found]:
    """The sections of a result that are shown as they are, by name."""
    sections = {
        name: section
        for name, section in result["sections"].items()
        if name not in SHOWN and section
    }
    return {
        name.replace("_", " "): section for name, section in sections.items() if section["findings"]
    }


def proof_view(result: Found, manifest: Found | None = None) -> view.ResultView:
    """Make the view of a proof.

    Args:
        result: a ``growkit.VerifyResult``.
        manifest: the target's ``growkit.json`` if there is one; it is not trusted.
    """
    result, manifest = figures_of(result), manifest or {}
    kind, at_fault = "good" if result["promise"] == "exact" else "warn", None
    if finding := failed(findings_of(result)):
        kind = "warn" if result["verdict"] == "no verdict" else "bad"
        cause = (result["fault"] or {}).get("cause")
        at_fault = "; ".join(filter(None, (finding["place"], cause))) or None
    source, target = (Path(str(result[key])).name for key in ("source", "target"))
    steps = "; ".join(steps_of(manifest))
    origin = f"made from {source} ({steps})" if steps else f"compared with its source {source}"
    promise = use = str(result["promise"])
    if not result["kept"] or next_step(result):
        use = ""
    elif promise == "exact" and (result["trainability"] or {}).get("trainable") is False:
        use = "untrainable"
    loading = f"It loads with {manifest['loads_with']}." if manifest.get("loads_with") else ""
    if manifest.get("not_kept"):
        loading = "Its weights are not kept: growkit.load makes them from the source."
    warnings = manifest.get("warnings")
    return view.ResultView(
        kind,
        result["verdict"].capitalize(),
        about=f"{source} → {target}",
        subject=f"{target}, {origin}",
        reason=str(result["reason"]),
        advice=recorded({"At fault": at_fault, "Next": next_step(result)}),
        promise=promise,
        use=use,
        loading=loading,
        warnings=[str(warning) for warning in warnings] if isinstance(warnings, list) else [],
        glance=glance(result),
        sections=[
            _difference(result),
            *tables(result),
            _layers(result),
            _logits(result),
            _positions(result),
            _copies(result),
            _low_rank(result),
            *(_section(name, section) for name, section in others_of(result).items()),
            *engine_topics(result["sections"].get("engine")),
            Topic("How it was measured", [recorded(result, CONDITIONS)]),
            _origin(manifest),
        ],
    )


def compared_on(result: Found) -> str:
    """State the predictions over which losses are averaged, e.g. ``510 predictions, text.txt``."""
    text = Path(str(result["text"])).name if result["text"] else "random tokens"
    return f"{counted(figures_of(result)['predictions'], 'prediction')}, {text}"


def native_name(result: Found) -> str:
    """Name the comparison in the storage dtype, e.g. ``in bfloat16``."""
    return f"in {result['native']['dtype']}"


def glance(result: Found) -> Found:
    """Select the most important findings."""
    result = figures_of(result)
    caught = "caught" if result["negative_control_caught"] else "NOT caught"
    cells = {
        "KL": _kl(result),
        "parameters": _parameters(result),
        "tensors": _tensors(result),
        "loss": _loss(result),
        "largest difference": _headroom(result),
        "inference modes": _modes(result["modes"]),
        "training": _training(result["training"]),
        "new capacity": _capacity(result["trainability"]),
        **{name: _cell(section["findings"]) for name, section in others_of(result).items()},
        "negative control": Cell(caught, str(result["negative_control"])),
        "proved": _proved(result),
    }
    return {name: entry for name, entry in cells.items() if entry}


def _cell(findings: Sequence[Found]) -> Cell:
    """The findings of a section in one cell."""
    kept = {finding["kept"] for finding in findings}
    first = next(word for how, word in KEPT.items() if how in kept)
    return Cell(first, "; ".join(str(finding["sentence"]) for finding in findings))


def _section(name: str, section: Found) -> Topic:
    """The findings and single figures of a section."""
    keys = ("name", "kept", "sentence", "measured", "limit")
    figures = {key: value for key, value in section.items() if not isinstance(value, list)}
    return Topic(name.capitalize(), [view.listing(section["findings"], keys, "httnn"), figures])


def _kl(result: Found) -> Cell | None:
    """The KL, if the promise allows a loss or the KL has a limit."""
    strict, limit = result["strict_float64"], result["max_kl"]
    if result["promise"] == "exact" and limit is None:
        return None
    notes = [f"at most {figure(limit)} allowed"] if limit is not None else []
    same = strict["top1_agreement"]
    notes += [f"{same:.1%} of the likeliest next tokens are the same"] if is_finite(same) else []
    return Cell(f"{figure(strict['kl_nats_per_token'])} nats per token", "; ".join(notes))


def _parameters(result: Found) -> Cell:
    before, after = result["source_parameters"], result["parameters"]
    ratio = f"{after / before:.3g}" if before else "1"
    factor = f"× {ratio}" if ratio != "1" else "" if after == before else f"{after - before:+,}"
    sizes = " → ".join(dict.fromkeys(size(result[key]) for key in ("source_bytes", "bytes")))
    note = f"{sizes} {native_name(result)}"
    return Cell(f"{before:,} → {after:,}", f"{factor}; {note}" if factor else note)


def _tensors(result: Found) -> Cell:
    recovered, every = result["tensors_recovered"], result["source_tensors"]
    if result["first_lost_tensor"]:
        return Cell("not all recovered", f"first: {result['first_lost_tensor']}")
    if result["recovered"] is False:
        return Cell("not all recovered", "the others are rounded to blocks of few bits")
    if recovered is None or every is None:
        why = "it is not known how the target was made, so the verdict is based on logits"
        return Cell("not compared", why)
    rest = every - recovered
    note = f"; the other {rest:,} went into tensors that are computed from them" if rest else ""
    return Cell(f"{recovered:,} of {every:,} recovered", f"bit for bit{note}")


def _loss(result: Found) -> Cell | None:
    strict, native = (
        [result[f"loss_{of}{ending}"] for of in ("source", "target")] for ending in ("", "_native")
    )
    if not any(map(is_finite, strict)):
        return None
    runs = f"{native_name(result)} {_arrow(native, '.4f')}; " if any(map(is_finite, native)) else ""
    form = ".6f" if result["promise"] == "exact" else ".4f"
    note = f"in strict float64; {runs}nats per token, {compared_on(result)}"
    return Cell(_arrow(strict, form), note)


def _arrow(values: Sequence[Any], form: str) -> str:
    return " → ".join(figure(value, form) for value in values)


def headroom(finding: Found) -> str | None:
    """State the distance of a finding from its limit, e.g. ``60 × below the limit``; or None."""
    measured, limit = finding["measured"], finding["limit"]
    if limit is None:
        return None
    if not measured:
        return "not a number" if measured is None else "no difference at all"
    if measured == limit:
        return "exactly the limit"
    ratio = float(f"{max(limit / measured, measured / max(limit, float_info.min)):.2g}")
    if not finding["kept"] and ratio >= FAR:
        return "far above the limit"
    shown = f"{ratio:,.0f}" if 10 <= ratio < 1e6 else f"{ratio:.2g}"
    return f"{shown} × {'below' if finding['kept'] else 'above'} the limit"


def _headroom(result: Found) -> Cell | None:
    names = {"strict_float64": "in strict float64", "native": native_name(result)}
    judged = [finding for finding in findings_of(result) if finding["name"] in names]
    margins = [(text, names[finding["name"]]) for finding in judged if (text := headroom(finding))]
    if not margins:
        return None
    (first, where), *rest = margins
    return Cell(first, "; ".join([where, *(" ".join(margin) for margin in rest)]))


def _modes(results: Sequence[Found]) -> Cell | None:
    if not results:
        return None
    tried = [mode for mode in results if mode["tried"]]
    words = {True: "kept", None: "without a limit", False: "not the same"}
    counts = {how: sum(mode["kept"] is how for mode in tried) for how in words}
    first = ", ".join(f"{count} {words[how]}" for how, count in counts.items() if count)
    failed = ", ".join(mode["name"] for mode in tried if mode["kept"] is False)
    names = ", ".join(mode["name"] for mode in tried)
    notes = [f"not the same with {failed}" if failed else names]
    reasons: dict[str, list[str]] = {}
    for mode in results:
        if not mode["tried"]:
            reasons.setdefault(mode["note"], []).append(mode["name"])
    notes += [f"not tried: {', '.join(names)} ({why})" for why, names in reasons.items()]
    return Cell(f"all {first}" if counts[True] == len(results) else first, "; ".join(notes))


def _training(section: Found | None) -> Cell | None:
    if not section:
        return None
    first = {
        True: "learns what the source does",
        False: "does NOT learn what the source does",
        None: "leaves the source's path",
    }[section["findings"][0]["kept"]]
    ends = _arrow([section[f"losses_{of}"][-1] for of in ("source", "target")], ".6f")
    steps = counted(section["steps"], "step")
    return Cell(first, f"after {steps} of AdamW in float64 the losses are {ends}")


def _capacity(section: Found | None) -> Cell | None:
    if not section:
        return None
    able = {True: "can train", False: "cannot train as it is", None: "unknown"}[
        section["trainable"]
    ]
    first = "copies stay equal" if section["identical_gradients"] else able
    sentences = (finding["sentence"] for finding in section["findings"])
    return Cell(first, next(sentences, "").removeprefix("new capacity: "))


def _proved(result: Found) -> Cell:
    took = f"in {duration(result['seconds'])}, " if is_finite(result["seconds"]) else ""
    when = f"{result['created'][:16].replace('T', ' ')} UTC"
    devices = [
        finding["sentence"] for finding in findings_of(result) if finding["name"] == "device"
    ]
    return Cell(when, "; ".join([f"{took}on {result['native']['device']}", *devices]))


def _difference(result: Found) -> Topic:
    keys = ("layer", "component", "tensor", "cause", "factor")
    first = ("first_differing_layer", "first_difference", "first_lost_tensor", "changed")
    facts = recorded(result["fault"] or {}, keys) | recorded(result, first)
    facts |= {value["name"]: value_sentence(value) for value in result["changed_values"]}
    return Topic("Where and why it differs", [facts])


def tables(result: Found) -> list[Topic]:
    """Make the tables of every proof: logits, losses and inference modes."""
    figures = figures_of(result)
    return [_numbers(figures), _losses(figures), _modes_table(figures)]


def _numbers(result: Found) -> Topic:
    """Compare logit differences with the effect of rounding on the source alone."""
    columns = [result[key] for key in ("strict_float64", "native", "rounding")]
    why = columns[0]["tolerance_why"]
    notes = {"tolerance": f" ({why})"} if why else {}
    rows = [
        [Cell(label, meaning + notes.get(key, "")), *(column[key] for column in columns)]
        for label, key, meaning in MEASURES
    ]
    heads = ["", "strict float64", native_name(result), "source's rounding"]
    return Topic("The numbers", [Grid(heads, rows, "hnnn")], brief=True)


def _losses(result: Found) -> Topic:
    """The losses of both models."""
    rows = []
    for name, ending in (("in strict float64", ""), (native_name(result), "_native")):
        before, after = (result[f"loss_{of}{ending}"] for of in ("source", "target"))
        if before is None and after is None:
            continue
        change = after - before if is_finite(before) and is_finite(after) else None
        shown = (figure(before, ".6f"), figure(after, ".6f"))
        rows.append([name, *shown, figure(change, "+.3g" if change else "g")])
    text = f"Over {compared_on(result)}."
    table = Grid(["", "before", "after", "change"], rows, "hnnn")
    return Topic("Loss before and after", [table], text)


def _modes_table(result: Found) -> Topic:
    """Logit differences in every inference mode."""
    verdicts = {True: "✓ kept", False: "✗ not kept", None: "no limit"}
    pairs = (("relative", "tolerance"), ("native", "native_tolerance"))
    rows = []
    for mode in result["modes"]:
        verdict = verdicts[mode["kept"]] if mode["tried"] else "not tried"
        row = [Cell(mode["name"], mode["note"]), verdict]
        for value, limit in ((mode[measured], mode[allowed]) for measured, allowed in pairs):
            shown = "no limit" if limit is None else limit
            row += [view.NOTHING, view.NOTHING] if value is limit is None else [value, shown]
        rows.append(row)
    heads = ["inference mode", "verdict", "strict float64", "limit", native_name(result)]
    return Topic("Inference modes", [Grid([*heads, "its limit"], rows, "hvnnnn")])


def _layers(result: Found) -> Topic:
    layers, tolerance = result["by_layer"], result["strict_float64"]["tolerance"]
    errors = [layer["relative"] for layer in layers]
    chart = drawing.line(
        errors,
        Titles("Error by layer", "layer", "error / scale of the source's states"),
        names=[str(layer["module"]).rpartition(".")[2] for layer in layers],
        log=True,
        limit=(tolerance, f"limit {tolerance:.3g}") if is_finite(tolerance) else None,
    )
    return Topic("Error by layer", **_unless_zero(errors, chart), half=True)


def _unless_zero(values: Sequence[Any], svg: str, caption: Cell | None = None) -> dict[str, Any]:
    """Give a section's chart, or mark that all of its values are zero."""
    if any(value != 0 for value in values):
        return {"charts": [view.Chart(svg, caption)]}
    return {"zero": bool(values)}


def _logits(result: Found) -> Topic:
    sample, largest = result["logit_sample"], result["rounding"]["max_abs_logit_diff"]
    title = "Logits, source against target"
    chart = drawing.residuals(
        sample,
        Titles(title, "logit of the source", "target − source"),
        (largest, "largest rounding of the source alone") if is_finite(largest) else None,
    )
    return Topic(title, charts=[view.Chart(chart)] if sample else [], half=True)


def binned(
    values: Sequence[float | None], counts: Sequence[int]
) -> list[tuple[str, float | None, int]]:
    """Group positions into at most ``MAX_BINS`` bins of equal width, except for the last.

    Args:
        values: the mean at each position.
        counts: tokens at each position.

    Returns:
        For each bin its first and last position, the mean over all of its tokens (None if a
        position has no number), and the number of tokens.
    """
    width, bins = 1, []
    while len(values) > MAX_BINS * width:
        width *= 2
    pairs = list(zip(values, counts, strict=False))
    for first in range(0, len(pairs), width):
        inside = pairs[first : first + width]
        tokens = sum(count for _, count in inside)
        # A mean must not hide a position without a number.
        known = [value * (count / tokens) for value, count in inside if is_finite(value)]
        mean = sum(known) if len(known) == len(inside) else None
        last = first + len(inside) - 1
        bins.append((str(first) if last == first else f"{first}–{last}", mean, tokens))
    return bins


def _positions(result: Found) -> Topic:
    values = result["kl_by_position"]
    bins = binned(values, result["tokens_by_position"])
    chart = drawing.line(
        [mean for _, mean, _ in bins],
        Titles("KL by position", "position in the window", "KL, nats per token"),
        names=[name for name, _, _ in bins],
    )
    rows = [[name, tokens, mean] for name, mean, tokens in bins]
    table = Grid(["positions", "tokens", "KL, nats per token"], rows, "hnn", fold="All positions")
    return Topic("KL by position", [table], **_unless_zero(values, chart), half=True)


def _copies(result: Found) -> Topic:
    capacity, matrices = _capacity(result["trainability"]), result["symmetry"]
    distances: dict[str, list[float]] = {}
    for matrix in matrices:
        if is_finite(matrix["relative_distance"]):
            kind = sub(r"\.\d+\.", ".*.", str(matrix["tensor"]))
            distances.setdefault(kind, []).append(matrix["relative_distance"])
    rows = [Interval(kind, fmean(s), min(s), max(s)) for kind, s in distances.items()]
    chart = drawing.intervals(
        rows,
        Titles("Distance between copies, by matrix", "relative distance between copies"),
        around_zero=False,
    )
    keys = ("tensor", "copies", "relative_distance", "effective_rank_gain")
    table = view.listing(matrices, keys, "cnnn", f"All {len(matrices):,} matrices")
    note = "the mean over layers, with a bar from the smallest to the largest"
    caption = Cell("How far the copies of a matrix are apart, relative to their size", note)
    shown = _unless_zero([row.high for row in rows], chart, caption)
    parts = [Paragraph(capacity.note), table] if capacity else [table]
    copied = matrices or (result["trainability"] or {}).get("copied")
    text = "Copies learn different things if their gradients differ." if copied else ""
    return Topic("Can the new capacity train?", parts, text, **shown, half=True)


def _low_rank(result: Found) -> Topic:
    by_rank, spectra = result["kl_by_rank"], result["spectra"]
    charts = []
    if by_rank:
        ranks = [point["rank"] for point in by_rank]
        chosen, *more = {spectrum["rank"] for spectrum in spectra} or {0}
        chart = drawing.line(
            [point["kl_nats_per_token"] for point in by_rank],
            Titles("KL by rank", "rank", "KL, nats per token"),
            names=list(map(str, ranks)),
            log=True,
            mark=(ranks.index(chosen), f"rank {chosen}, chosen")
            if chosen in ranks and not more
            else None,
        )
        charts.append(view.Chart(chart, Cell("KL by rank", "what another rank would cost or gain")))
    known = [spectrum for spectrum in spectra if is_finite(spectrum["residual"])]
    for spectrum in sorted(known, key=lambda spectrum: -spectrum["residual"])[:MAX_SPECTRA]:
        values, kept = spectrum["singular_values"], spectrum["kept"]
        chart = drawing.line(
            values,
            Titles(f"Singular values of {spectrum['module']}", "index", "singular value"),
            log=True,
            mark=(kept - 0.5, f"{kept} kept") if kept < len(values) else None,
        )
        note = f"{kept} kept, rank {spectrum['rank']}; residual {figure(spectrum['residual'])}"
        charts.append(view.Chart(chart, Cell(spectrum["module"], f"{note} {spectrum['unit']}")))
    keys = ("module", "rank", "residual", "unit")
    table = view.listing(spectra, keys, "cnnt", f"All {len(spectra):,} modules")
    return Topic("What the low rank holds", [table], charts=charts)


def _origin(manifest: Found) -> Topic:
    """Describe how the target was made, from the parts of a manifest that have growkit's form."""
    hashes = manifest.get("source_files")
    steps = {f"step {number}": step for number, step in enumerate(steps_of(manifest), 1)}
    items = list(hashes.items()) if isinstance(hashes, Mapping) else []
    table = Grid(["source file", "SHA-256"], items, "cc", fold="Source files")
    return Topic("How it was made", [steps | recorded(manifest, RECORDED), table])


def steps_of(manifest: Found) -> list[str]:
    """Describe each step of the target's recipe; empty without a recipe."""
    recipe = manifest.get("recipe")
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    return [
        ", ".join(f"{key} {value}" for key, value in step.items())
        for step in (steps if isinstance(steps, list) else [])
        if isinstance(step, Mapping)
    ]
