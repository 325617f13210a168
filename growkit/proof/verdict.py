"""The verdict: does the target compute what the source computes?

Every part of the proof returns findings: what was compared, what was measured, and whether it is
within its limit. The first finding that failed decides.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.progress import Progress, Silent
from growkit.base.settings import Settings
from growkit.base.tensors import total_bytes, total_parameters
from growkit.base.units import given_date, today
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import report_faults
from growkit.engine.device import (
    check_subnormal_numbers,
    choose_device,
    device_name,
    driver_versions,
    reproducible,
)
from growkit.engine.loader import loading
from growkit.engine.metrics import finite
from growkit.engine.prompts import make_prompts
from growkit.engine.user_family import temporary_family
from growkit.planning.plan import Lineage
from growkit.planning.updates import other_loss
from growkit.proof.adapter import NAME as ADAPTER
from growkit.proof.adapter import prove_adapter
from growkit.proof.control import PROBE
from growkit.proof.dequantised import dequantised_finding
from growkit.proof.folder import compare_folders
from growkit.proof.function import FunctionProof
from growkit.proof.modes import LOSS, modes, run_whole_models
from growkit.proof.preflight import check_vocabularies
from growkit.proof.series import series_errors
from growkit.proof.trainability import trainability_finding
from growkit.proof.training import check_room, prove_training, state_paths
from growkit.proof.weights import as_planned, check_order, compare_weights, origin_of
from growkit.recipe.manifest import read_record
from growkit.recipe.recipe import Recipe
from growkit.results import proof, versions
from growkit.sources import find, pair

VERDICTS = {
    "max_kl": "not as asked",
    ADAPTER: "preserved, but not with its adapter",
    "training": "preserved, but it does not learn as its source does",
    "trainability": "preserved, but it cannot train as asked",
    LOSS: "preserved, but its class returns another loss",
    "series": "preserved, but the series of its integral is wrong",
}
"""Verdicts on exact promises, by the failed finding, if that is not about the promise itself.

Such findings fail only on targets that keep their promise; the sentence reports both.
"""


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
) -> proof.VerifyResult:
    """Compare two model folders: weights, and logits in strict float64 and the storage dtype.

    Logits come from transformers' own classes, loaded from the files. An exact promise holds if no
    logit differs by more than a multiple of the source's own rounding error, in strict float64 and
    in the storage dtype (``docs/numerics.md``). If the target's manifest records how it was made,
    the source's weights must also be recovered from the target's, bit for bit.

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
    given: dict[str, Any] = {"text": text, "device": device, "prompts": prompts, "length": length}
    given |= {"seed": seed, "trainability": trainability, "max_kl": max_kl, "steps": steps}
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    state, of_source = (Path(each) if each is not None else None for each in (optimizer, adapter))
    if state is not None and settings.steps is None:
        raise InputError(
            f"the optimizer's state {state} is only for the training of both models; add --steps"
        )
    one, other = find(source), find(target)
    before, after = pair(one, other)
    recipe = read_record(after)
    check_order(before, after, recipe)
    verdict = prove(before, after, settings, recipe, progress, state, of_source)
    return proof.name_result(verdict, one.name, other.name)


def prove(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    progress: Progress,
    optimizer: Path | None = None,
    adapter: Path | None = None,
) -> proof.VerifyResult:
    """Compare two open checkpoints; see ``verify``.

    Args:
        before: the source.
        after: the target.
        settings: settings of the proof.
        recipe: the recipe of the target; None if it is not known.
        progress: receives the progress.
        optimizer: path of the source's optimizer state; None if it is not known.
        adapter: folder of the source's adapter; None if it is not to be compared.
    """
    given_date()  # before any work that takes time
    check_vocabularies(before, after)
    check_subnormal_numbers()
    place = choose_device(settings.device)
    started = time.perf_counter()
    total = 2 * (total_bytes(before.tensors) + total_bytes(after.tensors))
    bar = progress.bytes("proving", total)
    with reproducible(place) as varying, bar as advance, ExitStack() as described:
        origin = origin_of(before, after, recipe)
        # The family of a recipe that does not fit must not decide what is compared.
        described.enter_context(temporary_family(origin.family))
        lineage, exact = origin.lineage, origin.lineage.promise == "exact"
        prompts = make_prompts(settings, before.folder, before.config)
        trains = settings.steps is not None
        if trains and origin.unknown:
            raise InputError(
                f"to train {after.folder} alongside its source, its origin must be known, but "
                f"{origin.unknown}; leave out --steps"
            )
        check_room(settings, after.tensors, place)
        read = dequantised_finding(before) if before.quantised else None
        before = as_planned(before, origin)
        states = state_paths(before, after, recipe, optimizer) if trains else None
        files = compare_folders(before, after, origin)
        longest, look = max(map(len, prompts.windows)), settings.trainability
        logits = FunctionProof(before, after, place, origin, advance, longest, trainability=look)
        files.changed += (layer_settings := logits.changed_layer_settings())
        files.of_source += layer_settings if origin.unknown else []
        weights = compare_weights(origin, after)
        if exact and weights.settled and not files.changed:
            prompts = prompts.cut(*settings.settled.amount)
        another = other_loss(before, after)
        logits.run(modes(prompts.windows, before.config, after.config))
        tried = [
            *logits.mode_results(),
            *run_whole_models(
                before,
                after,
                prompts.windows[0],
                logits.place,
                logits.strict_limit.largest if exact or lineage.by_ties else None,
                another,
            ),
        ]
        findings = [weights.finding(lineage.promise), files.finding]
        findings += logits.findings(tried, settings.max_kl)
        fault = logits.fault(*findings[:3])
        _explain(findings, fault, exact=exact)
        if adapter and not proof.failed(findings):
            prompt = prompts.windows[0][:PROBE]
            findings.append(prove_adapter(logits, origin, adapter, prompt))
        training = None
        if states and not proof.failed(findings):
            training = prove_training(before, after, lineage, settings, logits.place, states)
            learned = proof.Finding(name="training", kept=training.kept, sentence=training.reason)
            learned.measured, learned.limit = training.relative, training.tolerance
            findings.append(learned)
        if read:
            findings.append(read)
            files.named += [read.sentence] if read.kept is not False else []
        if logits.trainability:
            findings.append(trainability_finding(logits.trainability, asked=look))
        series, of_layers = series_errors(after, prompts.windows, logits.place)
        findings += [found for found in (series, logits.device_finding(varying)) if found]
        fingerprint = logits.fingerprint()
    notes = [*files.named, *logits.notes, *([another] if another else [])]
    used = [
        {k: v for k, v in each.tensors.items() if k not in loading(each).unread}
        for each in (before, after)
    ]
    if recipe is not None and recipe.adapter is not None and adapter is None:
        notes.append("its adapter was not tried, as that of the source was not named (--adapter)")
    verdict = verdict_of(lineage.promise, findings, settings.max_kl)
    device, dtype = device_name(place), logits.native.dtype
    strict, native = logits.strict.prefill, logits.native.prefill
    shown = native if exact else strict
    return proof.VerifyResult(
        promise=lineage.promise,
        kept=not proof.failed(findings),
        verdict=verdict,
        reason=reason_of(verdict, lineage, findings, notes),
        findings=findings,
        weights_recovered=None if weights.unknown else weights.lost is None,
        first_lost_tensor=weights.lost,
        changed=files.changed,
        changed_values=files.values,
        notes=notes,
        unknown_files=files.unknown,
        strict_float64=strict.measured("float64", device_name(logits.place), logits.limit),
        native=native.measured(dtype, device, logits.native_limit if exact else None),
        rounding=logits.rounding.measured(dtype, device, None),
        max_kl=settings.max_kl,
        lost=lineage.lost or None,
        loss_source=finite(strict.loss_source / strict.predictions),
        loss_target=finite(strict.loss_target / strict.predictions),
        loss_source_native=finite(native.loss_source / native.predictions),
        loss_target_native=finite(native.loss_target / native.predictions),
        first_differing_layer=logits.first_difference[0],
        first_difference=logits.first_difference[1],
        fault=fault,
        by_layer=[
            proof.LayerError(module=m, relative=finite(e)) for m, e in logits.strict.by_layer
        ],
        series=of_layers,
        modes=tried,
        kl_by_position=shown.kl_by_position(),
        tokens_by_position=shown.tokens_by_position(),
        logit_sample=logits.native.sample,
        negative_control_caught=logits.caught,
        negative_control=logits.probe.fault,
        fingerprint=fingerprint,
        training=training,
        trainability=logits.trainability,
        symmetry=logits.symmetry,
        spectra=list(weights.spectra),
        kl_by_rank=[],
        tokens=strict.tokens,
        predictions=strict.predictions,
        text=settings.text,
        text_sha256=prompts.text_sha256,
        seed=settings.seed,
        source=str(before.folder),
        target=str(after.folder),
        source_parameters=total_parameters(used[0]),
        parameters=total_parameters(used[1]),
        source_bytes=total_bytes(used[0]),
        bytes=total_bytes(used[1]),
        tensors_recovered=weights.recovered[0] if weights.recovered else None,
        source_tensors=weights.recovered[1] if weights.recovered else None,
        created=today(),
        seconds=round(time.perf_counter() - started, 3),
        versions=versions() | driver_versions(place),
    )


def _explain(findings: Sequence[proof.Finding], fault: proof.Fault | None, *, exact: bool) -> None:
    """Add to findings on weights and files what those on logits show, and the reverse."""
    weights, files, logits = findings[:3]
    for each in (weights, files):
        if each.kept is False and exact and logits.kept:
            each.sentence += ", although no logit of these prompts shows it"
    for each in (weights, logits):
        if each.kept is False and fault:
            each.place = proof.fault_place(fault) or each.place


def verdict_of(promise: str, findings: Sequence[proof.Finding], max_kl: float | None) -> str:
    """The verdict in a few words, from the first finding that failed."""
    first = proof.failed(findings)
    if first is None and promise == "exact":
        return "preserved"
    if first is None:
        return "changed as requested" if max_kl is None else "within the limit"
    if first.name == "negative_control":
        return "no verdict"
    return VERDICTS.get(first.name, "not preserved") if promise == "exact" else "not as asked"


def reason_of(
    verdict: str, lineage: Lineage, findings: Sequence[proof.Finding], notes: Sequence[str]
) -> str:
    """The verdict in a sentence.

    Args:
        verdict: the verdict in a few words.
        lineage: how the target was made, with its promise.
        findings: the findings, in the order in which they decide.
        notes: notes on what the verdict does not cover.
    """
    by_name = {each.name: each for each in findings}
    weights, strict, native = (by_name[name] for name in ("weights", "strict_float64", "native"))
    first, exact = proof.failed(findings), lineage.promise == "exact"
    parts = []
    if first:
        # Failures of weights, files and logits belong together; else the first is enough.
        together = [each for each in (weights, by_name["files"], strict) if each.kept is False]
        parts = [each.sentence for each in together or [first]]
    if first is None or first.name in VERDICTS:
        recovered = f"{weights.sentence}, and " if exact and weights.kept else ""
        parts.append(recovered + strict.sentence)
        parts += [f"but {native.sentence}"] if exact and native.kept is None else []
        others = [by_name[name] for name in (ADAPTER, "training") if name in by_name]
        parts += [each.sentence for each in others if each != first]
    parts += [weights.sentence] if weights.kept is None else []
    if (device := by_name.get("device")) and (first or not device.kept):
        parts.append(device.sentence)
    parts += notes
    last = [by_name[name] for name in ("series", "amount") if name in by_name]
    parts += [each.sentence for each in last if each != first]
    # What was given up may also be why logits differ by more than rounding explains.
    named = first is None or (first is strict and not exact)
    given_up = f" ({lineage.lost})" if lineage.lost and named else ""
    return f"{verdict}{given_up}: {'; '.join(parts)}"
