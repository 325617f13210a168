"""Results as notebooks show them: a heading and a few rows that need nothing else.

Notebooks are light or dark without saying so, and some strip styles from what they show. So text
keeps the colour that it finds itself in, and no paper is set. The one colour that is used stands
out from white and from black, and says nothing that a sign and words do not say as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from growkit.report.glance import at_a_glance
from growkit.report.header import SIGNS, to_do, verdict_of
from growkit.report.markup import escape
from growkit.report.probe import WORDS, apart, called
from growkit.report.probe_page import verdict_of as found
from growkit.report.summary import size, summary
from growkit.results.probe import probe_next

if TYPE_CHECKING:
    from growkit.inspection import Inspection
    from growkit.results.operation import GrowResult
    from growkit.results.probe import ProbeResult
    from growkit.results.proof import VerifyResult

COLOURS = {"good": "#2e9e57", "warn": "#b07a10", "bad": "#e0483e", "": "#808080"}
"""Of verdicts; the last is of what is none."""

Rows = Iterable[tuple[str, str, str]]
"""A name, what is read first, and what is read then."""


def verdict_html(result: VerifyResult) -> str:
    """A verdict and what people look for under it; on a failure first what to do."""
    kind, verdict = verdict_of(result)
    return _box(kind, verdict, result.reason, _verdict(result))


def growth_html(result: GrowResult) -> str:
    """What was done, or would be, and its proof."""
    proof = result.verification
    rows = [*_growth(result), *(_verdict(proof) if proof else [])]
    if proof:
        kind, verdict = verdict_of(proof)
        return _box(kind, verdict, proof.reason, rows)
    told = "Dry run: nothing was written" if result.dry_run else "Written, not verified"
    return _box("", told, f"promise: {result.promise}", rows)


def probe_html(result: ProbeResult) -> str:
    """What was found, and the order."""
    kind, verdict = found(result)
    source = next(each["name"] for each in result["candidates"] if each["source"])
    order = (
        (
            called(each),
            WORDS[each["outcome"]] if each["loss"] is None else f"{each['loss']:.4f}",
            each["reason"] or apart(result, each["name"], source),
        )
        for each in result["candidates"]
    )
    return _box(kind, verdict, result["reason"], [("Next", probe_next(result), ""), *order])


def inspection_html(result: Inspection) -> str:
    """What a checkpoint is."""
    return _box("", result.folder, "", ((name, line, "") for name, line in at_a_glance(result)))


def _verdict(result: VerifyResult) -> Rows:
    if not result.kept:
        yield from ((name, str(line), "") for name, line in to_do(result).items() if line)
    elif result.lost:
        yield "lost", result.lost, ""
    for name, line in summary(result).items():
        yield name, line.first, line.then


def _growth(result: GrowResult) -> Rows:
    yield "output", result.output, ""
    if not result.verification:
        yield "parameters", f"{result.source_parameters:,} → {result.parameters:,}", ""
        yield "size", size(result.bytes), f"in {result.dtype}"
        if result.lost:
            yield "lost", result.lost, ""
    if result.loads_with:
        yield "loads with", result.loads_with, ""
    for warning in result.warnings:
        yield "note", warning, ""


def _box(kind: str, title: str, told: str, rows: Rows) -> str:
    """A heading, a sentence, and rows; whatever comes from files is escaped here."""
    colour = COLOURS[kind]
    sign = f'<span aria-hidden="true" style="color:{colour}">{SIGNS[kind]}</span> ' if kind else ""
    body = "".join(f"<tr>{_head(name)}{_cell(first, then)}</tr>" for name, first, then in rows)
    sentence = f"<p>{escape(told)}</p>" if told else ""
    return (
        f'<div style="border-left:4px solid {colour};padding-left:12px">'
        f"<p><strong>{sign}{escape(title)}</strong></p>{sentence}"
        f"<table>{body}</table></div>"
    )


def _head(name: Any) -> str:
    style = "text-align:left;vertical-align:top;padding-right:8px"
    return f'<th scope="row" style="{style}">{escape(name)}</th>'


def _cell(first: str, then: str) -> str:
    shown = f"<strong>{escape(first)}</strong> {escape(then)}" if then else escape(first)
    return f'<td style="text-align:left;overflow-wrap:anywhere">{shown}</td>'
