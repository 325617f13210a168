"""The verdict: does the target compute what the source computes?

Every part of the proof returns findings: what was compared, what was measured, and whether it is
within its limit. The first finding that failed decides.
"""

import time

from growkit.base.units import given_date, today
from growkit.engine.device import driver_versions
from growkit.proof.check import checks
from growkit.proof.files import compare_folders
from growkit.proof.logits import Function, compare_function
from growkit.proof.logits_section import device_section, fault_of, logits_section
from growkit.proof.mode_results import modes_section
from growkit.proof.modes import modes
from growkit.proof.pair import Pair, Request, open_pair
from growkit.proof.side_by_side import SideBySide
from growkit.proof.weights import compare_weights
from growkit.results import proof_result as proof
from growkit.results import versions
from growkit.results.proof_result import Fault, Sections, VerifyResult


def prove(request: Request) -> VerifyResult:
    """Compare two open checkpoints; see ``verify``."""
    given_date()  # before any work that takes time
    started = time.perf_counter()
    with open_pair(request) as pair:
        for check in checks().values():
            if check.prepare:
                pair = check.prepare(pair) or pair
        side = SideBySide.of(pair)
        layer_settings = side.changed_layer_settings()
        files = compare_folders(pair, layer_settings).section
        recovered = compare_weights(pair.lineage, pair.after)
        if pair.exact and recovered.all_recovered and not files.changed:
            pair = pair.if_weights_recovered()
        asked = modes(pair.prompts.windows, pair.before.config, pair.after.config)
        function = compare_function(pair, side, asked)
        sections = Sections(
            weights=recovered.section(pair.lineage.promise, pair.before, pair.after),
            files=files,
            logits=logits_section(function),
            modes=modes_section(function),
        )
        fault = explain(function, sections)
        for name, check in checks().items():
            skipped = check.if_kept and proof.failed(sections.findings)
            sections[name] = None if skipped else check.run(pair, function)
        sections["device"] = device_section(function)
    return result_of(pair, sections, fault, started)


def explain(function: Function, sections: Sections) -> Fault | None:
    """Locate the fault; add to findings on weights and files what logits show, and the reverse."""
    core = sections.weights, sections.files, sections.logits
    weights, files, logits = (section.findings[0] for section in core)
    fault = fault_of(function, weights, files, logits)
    for finding in (weights, files):
        if finding.kept is False and function.pair.exact and logits.kept:
            finding.sentence += ", although no logit of these prompts shows it"
    for finding in (weights, logits):
        if finding.kept is False and fault:
            finding.place = proof.fault_place(fault) or finding.place
    return fault


def result_of(pair: Pair, sections: Sections, fault: Fault | None, started: float) -> VerifyResult:
    """The verdict on a pair.

    Args:
        pair: source and target.
        sections: what the checks found.
        fault: where and why the two differ.
        started: when the proof started, in seconds of ``time.perf_counter``.
    """
    lineage, settings = pair.lineage, pair.settings
    result = VerifyResult(
        promise=lineage.promise,
        kept=not proof.failed(sections.findings),
        verdict="",
        reason="",
        lost=lineage.lost or None,
        fault=fault,
        sections=sections,
        text=settings.text,
        text_sha256=pair.prompts.text_sha256,
        seed=settings.seed,
        source=str(pair.before.folder),
        target=str(pair.after.folder),
        created=today(),
        seconds=round(time.perf_counter() - started, 3),
        versions=versions() | driver_versions(pair.device),
    )
    result.verdict = verdict_of(result)
    result.reason = reason_of(result)
    return result


def verdict_of(result: VerifyResult) -> str:
    """The verdict in a few words, from the first finding that failed."""
    first, exact = proof.failed(proof.findings_of(result)), result.promise == "exact"
    if first is None and exact:
        return "preserved"
    if first is None:
        unlimited = result.sections.logits.max_kl is None
        return "changed as requested" if unlimited else "within the limit"
    if first.name == "negative_control":
        return "no verdict"
    return first.verdict or "not preserved" if exact else "not as asked"


def reason_of(result: VerifyResult) -> str:
    """The verdict in a sentence."""
    exact = result.promise == "exact"
    findings = proof.findings_of(result)
    by_name = {finding.name: finding for finding in findings}
    core = (by_name[name] for name in ("weights", "files", "strict_float64", "native"))
    weights, files, strict, native = core
    first = proof.failed(findings)
    # Failures of weights, files and logits belong together; else the first is enough.
    together = [finding for finding in (weights, files, strict) if finding.kept is False]
    parts = [finding.sentence for finding in together or filter(None, [first])] if first else []
    if first is None or first.verdict:
        recovered = f"{weights.sentence}, and " if exact and weights.kept else ""
        parts.append(recovered + strict.sentence)
        parts += [f"but {native.sentence}"] if exact and native.kept is None else []
    parts += [finding.sentence for finding in findings if finding.in_reason and finding != first]
    parts += proof.notes_of(result)
    # What was given up may also be why logits differ by more than rounding explains.
    named = first is None or (first is strict and not exact)
    given_up = [result.lost] if result.lost and named else []
    return f"{result.verdict}: {'; '.join([*given_up, *parts])}"
