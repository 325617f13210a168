"""The verdict: does the target compute what the source computes?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from growkit.base.errors import InputError
from growkit.base.limits import within
from growkit.base.progress import Advance, Progress, Silent
from growkit.base.settings import Settings
from growkit.base.tensors import total_bytes, total_parameters
from growkit.base.units import given_date, today
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.metrics import finite
from growkit.engine.prompts import make_prompts
from growkit.engine.strict import choose_device, device_name, reproducible
from growkit.engine.user_family import temporary_family, unlisted_family
from growkit.proof.findings import judge_function, judge_training, reason_of, verdict_of
from growkit.proof.fingerprint import question
from growkit.proof.folder import compare_folders
from growkit.proof.modes import Mode, modes, result, used
from growkit.proof.parts import NO_NUMBERS, Native, ProofParts, Strict
from growkit.proof.preflight import check_vocabularies, vocabulary_error
from growkit.proof.training import NO_STATES, check_room, prove_training, state_paths
from growkit.proof.weights import (
    Origin,
    Recovered,
    as_planned,
    check_order,
    compare_weights,
    origin_of,
)
from growkit.recipe.manifest import read_record
from growkit.recipe.recipe import Recipe
from growkit.results import versions
from growkit.results.advice import failed, name_result
from growkit.results.proof import LayerError, ModeResult, VerifyResult
from growkit.results.sentences import fault_place
from growkit.sources import Source, find, pair

UNUSED = "the family in the manifest was not used, since growkit has one of its own for this type"


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
    progress: Progress = Silent(),
) -> VerifyResult:
    """Compare two model folders: weights, and logits in strict float64 and the storage dtype.

    Logits come from transformers' own classes, loaded from the files as they are. An exact promise
    is kept when no logit differs by more than some times what rounding does to the source itself,
    in strict float64 and in the storage dtype (``docs/numerics.md``). Where the target's manifest
    records how it was made, its weights must also give the source's back, bit for bit.

    Args:
        source: folder of the model that was grown, or its name on the Hub; see ``growkit.grow``.
        target: folder of the model that it became.
        settings: what is compared. The following arguments override it.
        text: file with real text, tokenized by the source's tokenizer; random tokens without.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        prompts: number of windows of text, or of random prompts; 8 without, or 4 where every weight
            has given the source's back.
        length: tokens in each, at most the model's longest context; 512 without, or 48 there.
        seed: of the random prompts.
        trainability: whether every parameter of the target must be able to train.
        max_kl: nats per token of KL above which the target is not kept; no limit without.
        steps: of AdamW that both take in strict float64, to see whether they learn the same; no
            training without.
        optimizer: the state of the source's optimizer that the target was grown with, for these
            steps; without, the state in the source's folder, if the target was grown with it.
        progress: where progress is shown, such as ``growkit.Bars()``.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    given: dict[str, Any] = {
        "text": text,
        "device": device,
        "prompts": prompts,
        "length": length,
        "seed": seed,
        "trainability": trainability,
        "max_kl": max_kl,
        "steps": steps,
    }
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    state = Path(optimizer) if optimizer is not None else None
    return verify_found(find(source), find(target), settings, state, progress)


def verify_found(
    source: Source, target: Source, settings: Settings, optimizer: Path | None, progress: Progress
) -> VerifyResult:
    """See ``verify``; the two models are found already."""
    if optimizer is not None and settings.steps is None:
        raise InputError(
            f"{optimizer} is for the training of both models, and no steps of it were asked for; "
            "add --steps"
        )
    before, after = pair(source, target)
    record = read_record(after)
    check_order(before, after, record.recipe)
    verdict = prove(before, after, settings, record.recipe, progress, optimizer)
    verdict["kl_by_rank"] = list(record.kl_by_rank)
    return name_result(verdict, source.name, target.name)


def prove(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    progress: Progress,
    optimizer: Path | None = None,
) -> VerifyResult:
    """See ``verify``.

    Args:
        before: the source.
        after: the target.
        settings: what is compared.
        recipe: how the target was made, if that is known.
        progress: see ``verify``.
        optimizer: the state of the source's optimizer, where that is known.
    """
    given_date()  # before anything that takes time
    check_vocabularies(before, after)
    place = choose_device(settings.device)
    started = time.perf_counter()
    described = unlisted_family(recipe.family) if recipe else None
    with temporary_family(described), reproducible(place):
        origin = origin_of(before, after, recipe)
    # A recipe that does not fit must not decide what is compared.
    known = temporary_family(None if origin.unknown else described)
    total = 2 * (total_bytes(before.tensors) + total_bytes(after.tensors))
    with known, reproducible(place), progress.bytes("proving", total) as advance:
        verdict = _proved(before, after, settings, recipe, advance, place, optimizer, origin)
    verdict["seconds"] = round(time.perf_counter() - started, 3)
    return verdict


def _proved(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    advance: Advance,
    place: torch.device,
    optimizer: Path | None,
    origin: Origin,
) -> VerifyResult:
    prompts = make_prompts(settings, before.folder, before.config)
    lineage = origin.lineage
    if settings.steps is not None and origin.unknown:
        raise InputError(
            f"training {after.folder} alongside its source needs to know how it was made, but "
            f"{origin.unknown}; leave out --steps"
        )
    before = as_planned(before, origin)
    check_room(settings, after.tensors, place)
    trains = settings.steps is not None
    states = state_paths(before, after, recipe, optimizer) if trains else NO_STATES
    planned = None if origin.unknown else lineage.plans[-1].config
    files = compare_folders(before, after, planned, recipe)
    known = question(before, max(map(len, prompts.windows)))
    proof = ProofParts(
        before, after, place, origin, advance, known, trainability=settings.trainability
    )
    unused = [UNUSED] if recipe and recipe.family and not unlisted_family(recipe.family) else []
    layer_settings = proof.changed_layer_settings()
    files = replace(
        files,
        changed=[*files.changed, *layer_settings],
        of_source=[*files.of_source, *(layer_settings if origin.unknown else [])],
    )
    unknown = Recovered(unknown=origin.unknown)
    weights = unknown if origin.unknown else compare_weights(lineage, after)
    if proof.exact and weights.settled and not files.changed:
        prompts = prompts.cut(*settings.settled.amount)
    asked, strict = proof.asked(modes(prompts.windows, before.config, after.config))
    native = proof.native(asked, strict)
    exact = proof.exact
    in_use = list(used(before, after, prompts.windows[0], place, exact))
    tried = [*_mode_results(asked, strict, native, exact), *in_use]
    findings = judge_function(lineage, weights, files, strict, native, tried, settings.max_kl)
    training = None
    if not failed(findings) and settings.steps is not None:
        training = prove_training(before, after, lineage, settings, place, states)
    findings += judge_training(training, strict.trainability, wanted=settings.trainability)
    by_name = {each.name: each for each in findings}
    if origin.unknown and proof.more_tokens and not strict.kept_within(native.tolerance):
        raise vocabulary_error(before, after, by_name["strict_float64"].sentence)
    verdict = verdict_of(lineage.promise, findings, settings.max_kl)
    notes = [*files.named, *unused, *strict.notes]
    fault = proof.fault(strict, weights, files, asked)
    distance, rounded = strict.compared.prefill, native.compared.prefill
    logits = by_name["strict_float64"]
    for each in (by_name["weights"], logits):
        if fault and each.kept is False:
            each.place = fault_place(fault) or each.place
    shown = native.compared if exact else strict.compared
    return VerifyResult(
        promise=lineage.promise,
        kept=not failed(findings),
        verdict=verdict,
        reason=reason_of(verdict, lineage.promise, lineage.lost, findings, notes),
        findings=findings,
        weights_recovered=None if weights.unknown else weights.lost is None,
        first_lost_tensor=weights.lost,
        changed=list(files.changed),
        changed_values=list(files.values),
        notes=notes,
        unknown_files=list(files.unknown),
        strict_float64=distance.measured(
            "float64",
            device_name(place),
            logits.limit,
            None if logits.limit is None else strict.why if exact else native.why,
        ),
        native=native.measured(exact),
        rounding=native.rounding.measured(native.dtype, native.device, None, None),
        max_kl=settings.max_kl,
        lost=lineage.lost or None,
        loss_source=finite(distance.loss_source / distance.predictions),
        loss_target=finite(distance.loss_target / distance.predictions),
        loss_source_native=finite(rounded.loss_source / rounded.predictions),
        loss_target_native=finite(rounded.loss_target / rounded.predictions),
        first_differing_layer=strict.first_difference[0],
        first_difference=strict.first_difference[1],
        fault=fault,
        by_layer=[LayerError(module=m, relative=finite(e)) for m, e in strict.compared.by_layer],
        modes=tried,
        kl_by_position=shown.prefill.kl_by_position(),
        tokens_by_position=shown.prefill.tokens_by_position(),
        logit_sample=native.compared.sample,
        negative_control_caught=strict.caught,
        negative_control=strict.probe.fault,
        fingerprint=proof.fingerprint(strict, native),
        training=training,
        trainability=strict.trainability,
        symmetry=strict.symmetry,
        spectra=list(weights.spectra),
        kl_by_rank=[],
        tokens=distance.tokens,
        predictions=distance.predictions,
        text=settings.text,
        text_sha256=prompts.text_sha256,
        seed=settings.seed,
        source=str(before.folder),
        target=str(after.folder),
        source_parameters=total_parameters(before.tensors),
        parameters=total_parameters(after.tensors),
        source_bytes=total_bytes(before.tensors),
        bytes=total_bytes(after.tensors),
        tensors_recovered=weights.recovered[0] if weights.recovered else None,
        source_tensors=weights.recovered[1] if weights.recovered else None,
        created=today(),
        seconds=0.0,
        versions=versions(),
    )


def _mode_results(
    asked: Sequence[Mode], strict: Strict, native: Native, exact: bool
) -> list[ModeResult]:
    results = []
    for mode in asked:
        if not mode.calls:
            kept = False if mode.failed and exact else None
            results.append(result(mode.name, mode.note, kept=kept, tried=mode.failed))
            continue
        found = strict.compared.distances[mode.name].relative
        running = native.compared.distances[mode.name]
        limit = native.tolerance if running.usable else None
        kept = within(found, strict.tolerance)
        kept &= limit is None or within(running.relative, limit)
        silent = "" if running.usable else f"in {native.dtype} {NO_NUMBERS}"
        results.append(
            result(
                mode.name,
                "; ".join(filter(None, (mode.note, silent))),
                relative=finite(found),
                tolerance=strict.tolerance if exact else None,
                native=finite(running.relative),
                native_tolerance=limit if exact else None,
                kept=kept if exact else None,
            )
        )
    return results
