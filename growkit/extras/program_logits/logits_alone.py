"""Logits alone: those of other programs against the source's class in strict float64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from growkit.base.lazy import usual_torch
from growkit.base.progress import Progress, Silent, shown
from growkit.base.units import today
from growkit.engine.device import CPU, check_subnormal_numbers, reproducible
from growkit.extras.program_logits.judging import compare_engines
from growkit.extras.program_logits.results.engine_result import EngineResult, EngineSections
from growkit.model.checkpoint.scratch import report_faults
from growkit.results import versions
from growkit.results.proof_result import failed
from growkit.sources import find


@report_faults()
@usual_torch()
def verify_logits(
    source: str | Path, logits: Sequence[str | Path], *, progress: Progress = Silent()
) -> EngineResult:
    """Compare logits that other programs computed with strict float64 by the source's own class.

    The difference is rounding, if the class's own rounding in the program's dtype explains it; a
    setting, if a wrong one, tried on the source in memory, explains it; or else a fault.
    ``docs/how-to/same-model.md`` describes the files. It runs on the CPU.

    Args:
        source: folder of the model that the programs ran, or its name on the Hub.
        logits: a file for each program, of the same tokens.
        progress: receives the progress, such as ``growkit.Bars()``.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: the source cannot run, or a file cannot be compared with it.
    """
    started, one = time.perf_counter(), find(source)
    check_subnormal_numbers()
    with reproducible(CPU), shown(progress):
        section = compare_engines(one.open(), [Path(file) for file in logits])
    first = failed(section.findings)
    verdict = "rounding" if first is None else str(first.verdict)
    failures_first = sorted(section.findings, key=lambda finding: finding.kept is not False)
    sentences = [finding.sentence for finding in failures_first]
    return EngineResult(
        kept=first is None,
        verdict=verdict,
        reason=f"{verdict}: {'; '.join([*sentences, *section.notes])}",
        sections=EngineSections(engine=section),
        source=one.name,
        created=today(),
        seconds=round(time.perf_counter() - started, 3),
        versions=versions(),
    )
