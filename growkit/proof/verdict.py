"""The verdict: does the target compute what the source computes?

Every part of the proof returns findings: what was compared, what was measured, and whether it is
within its limit. The first finding that failed decides.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.progress import Progress, Silent
from growkit.base.settings import Settings
from growkit.base.units import given_date, today
from growkit.checkpoint.scratch import report_faults
from growkit.engine.device import driver_versions
from growkit.proof.check import checks
from growkit.proof.files import compare_folders
from growkit.proof.function import (
    Function,
    compare_function,
    device_section,
    fault_of,
    logits_section,
)
from growkit.proof.modes import modes, modes_section
from growkit.proof.pair import Pair, Request, open_pair
from growkit.proof.side_by_side import SideBySide
from growkit.proof.weights import check_order, compare_weights
from growkit.recipe.manifest import read_record
from growkit.results import proof_result as proof
from growkit.results import versions
from growkit.results.proof_result import Fault, Sections, VerifyResult
from growkit.sources import find
from growkit.sources import pair as open_checkpoints


@report_faults()
@usual_torch()
def verify(
    source: str | Path,
    target: str | Path,
    settings: Settings = Settings(),
    *,
    text: str | Path | None = None,
    device: str | None = None,
    prompts: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    trainability: bool | None = None,
    max_kl: float | None = None,
    steps: int | None = None,
    optimizer: str | Path | None = None,
    adapter: str | Path | None = None,
    progress: Progress = Silent(),
) -> VerifyResult:
    """Compare two model folders: weights, and logits in strict float64 and the storage dtype.

    Logits come from transformers' own classes, loaded from the files. An exact promise holds if no
    logit differs by more than a multiple of the source's own rounding error, in strict float64 and
    in the storage dtype (``docs/explanation/numerics.md``). If the target's manifest records how it
    was made, the source's weights must also be recovered from the target's, bit for bit.

    Args:
        source: folder of the model that was grown, or its name on the Hub; see ``growkit.grow``.
        target: folder of the grown model.
        settings: settings of the proof. The following arguments override them.
        text: file with real text, for the source's tokenizer; None for random tokens.
        device: see ``Settings``.
        prompts: number of windows of text, or of random prompts; None for 8, or for 4 if every
            weight was recovered.
        length: tokens in each prompt, at most the model's longest context; None for 512, or for 48
            if every weight was recovered.
        seed: seed of the random prompts.
        trainability: whether every parameter of the target must be able to train.
        max_kl: largest accepted KL, in nats per token; None for no limit.
        steps: AdamW steps that both models take in strict float64, to compare what they learn;
            None for no training.
        optimizer: the source's optimizer state that was grown with the target, for these steps;
            None for the state in the source's folder, if the target was grown with one.
        adapter: the source's adapter that was grown with the target, to compare both models with
            their adapters as well, in PEFT.
        progress: receives the progress, such as ``growkit.Bars()``.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    chosen: dict[str, Any] = {"text": text, "device": device, "prompts": prompts, "length": length}
    chosen |= {"seed": seed, "trainability": trainability, "max_kl": max_kl, "steps": steps}
    settings = replace(settings, **{k: v for k, v in chosen.items() if v is not None})
    state, of_source = (Path(path) if path is not None else None for path in (optimizer, adapter))
    if state is not None and settings.steps is None:
        raise InputError(
            f"the optimizer's state {state} is only for the training of both models; add --steps"
        )
    one, other = find(source), find(target)
    before, after = open_checkpoints(one, other)
    recipe = read_record(after)
    check_order(before, after, recipe)
    request = Request(before, after, settings, recipe, progress, state, of_source)
    verdict = prove(request)
    return proof.name_result(verdict, one.name, other.name)


def prove(request: Request) -> VerifyResult:
    """Compare two open checkpoints; see ``verify``."""
    given_date()  # before any work that takes time
    started = time.perf_counter()
    with open_pair(request) as pair:
        for check in checks().values():
            if check.refuse:
                check.refuse(pair)
        side = SideBySide.of(pair)
        layer_settings = side.changed_layer_settings()
        files = compare_folders(pair.before, pair.after, pair.origin, layer_settings).section
        recovered = compare_weights(pair.origin, pair.after)
        if pair.exact and recovered.all_recovered and not files.changed:
            pair = pair.if_weights_recovered()
        asked = modes(pair.prompts.windows, pair.before.config, pair.after.config)
        function = compare_function(pair, side, asked)
        sections = Sections(
            weights=recovered.section(pair.lineage.promise, pair.before, pair.after),
            files=files,
            logits=logits_section(function),
            modes=modes_section(function),
            trainability=function.strict.trainability,
        )
        fault = explain(function, sections)
        for name, check in checks().items():
            if not check.if_kept or not proof.failed(sections.findings):
                sections[name] = check.run(pair, function)
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
