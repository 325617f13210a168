"""What a low rank holds of a model and what it loses, as a section of a proof's page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from growkit.report import drawing
from growkit.report.header import Found
from growkit.report.markup import figure, framed, is_number, more, section, table

MOST_SPECTRA = 4
"""Spectra that are drawn; the others are in a table."""


def low_rank(result: Found) -> str:
    """The section on it; empty if no rank was chosen.

    Args:
        result: of a proof.
    """
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
            mark=_chosen(by_rank, spectra),
            places=[point["rank"] for point in by_rank],
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
            mark=(kept - 0.5, _held(found)) if is_number(kept) and _loses(found) else None,
        )
        note = f"residual {figure(found.get('residual'))} {found.get('unit') or ''}"
        if not _loses(found):
            note = f"all {_held(found)}; {note}"
        charts.append(framed(chart, found["module"], note))
    rows = [[found.get(key) for key in ("module", "rank", "residual", "unit")] for found in spectra]
    return section(
        "What the low rank holds",
        _held_by(spectra),
        f'<div class="charts">{"".join(charts)}</div>' if charts else "",
        more(f"All {len(rows):,} modules", table(["module", "rank", "residual", ""], rows, "cnnt")),
    )


def _held_by(spectra: Sequence[Found]) -> str:
    """What the spectra show."""
    if not spectra:
        return ""
    drawn = f"Drawn are the largest, at most {MOST_SPECTRA}."
    if not any(_loses(found) for found in spectra):
        return f"Every singular value is kept; the residual is what rounding leaves. {drawn}"
    return (
        "A low-rank step keeps the singular values on the left of the dashed line and loses the "
        f"rest; the residual says how much. {drawn}"
    )


def _loses(spectrum: Found) -> bool:
    kept = spectrum.get("kept")
    return not is_number(kept) or kept < len(spectrum.get("singular_values") or [])


def _chosen(by_rank: Sequence[Found], spectra: Sequence[Found]) -> tuple[float, str] | None:
    """Which of the ranks that were tried all spectra have, as a mark; None if there is none."""
    ranks = {found.get("rank") for found in spectra}
    tried = [index for index, point in enumerate(by_rank) if {point["rank"]} == ranks]
    return (tried[0], f"rank {by_rank[tried[0]]['rank']}, chosen") if tried else None


def _held(spectrum: Found) -> str:
    """How many singular values a rank keeps; a matrix may hold the updates of several heads."""
    kept, rank = spectrum.get("kept"), spectrum.get("rank")
    return f"{kept} kept" if kept == rank else f"{kept} kept (rank {rank})"
