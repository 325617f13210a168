"""What a proof says of the logits: figures, findings, the device, and where a fault is."""

from __future__ import annotations

import math

from growkit.base.limits import SPACING, within
from growkit.engine.device import CPU, device_name, driver_versions
from growkit.engine.metrics import finite
from growkit.proof.fingerprint import fingerprint, widest
from growkit.proof.localisation import tensor_fault
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import (
    AGAIN,
    MORE,
    Fault,
    Finding,
    Fingerprint,
    LayerError,
    LogitsSection,
    Section,
    counted,
    too_much,
)

FEW = 100
"""With fewer predictions, the verdict reports their number."""


def logits_section(function: Function) -> LogitsSection:
    """The section on logits."""
    pair, strict, native = function.pair, function.strict, function.native
    exactly, stored = strict.compared.prefill, native.compared.prefill
    shown = stored if pair.exact else exactly
    device, dtype = device_name(pair.device), native.compared.dtype
    losses = {
        f"loss_{model}{ending}": finite(getattr(prefill, f"loss_{model}") / prefill.predictions)
        for ending, prefill in (("", exactly), ("_native", stored))
        for model in ("source", "target")
    }
    layer, module = function.first_difference
    return LogitsSection(
        findings=_findings(function),
        notes=[*strict.notes],
        strict_float64=exactly.measured("float64", device_name(strict.side.place), function.limit),
        native=stored.measured(dtype, device, native.limit if pair.exact else None),
        rounding=native.rounding.measured(dtype, device, None),
        inflation=native.inflation and finite(native.inflation.ratio),
        inflation_limit=native.inflation and finite(native.inflation.limit),
        max_kl=pair.settings.max_kl,
        **losses,
        first_differing_layer=layer,
        first_difference=module,
        by_layer=[
            LayerError(module=name, relative=finite(error))
            for name, error in strict.compared.by_layer
        ],
        kl_by_position=shown.kl_by_position(),
        tokens_by_position=shown.tokens_by_position(),
        logit_sample=native.compared.sample,
        negative_control=strict.controls.fault,
        negative_control_caught=strict.caught,
        fingerprint=_fingerprint(function),
        tokens=exactly.tokens,
        predictions=exactly.predictions,
    )


def _findings(function: Function) -> list[Finding]:
    """The findings on logits, in the order in which they decide."""
    strict, kept = function.strict, function.kept
    control = strict.controls
    findings = [
        Finding(
            name="strict_float64",
            kept=kept,
            sentence=_sentence(function),
            place=function.first_difference[1],
            measured=finite(strict.compared.largest),
            limit=function.limit and function.limit.largest,
            advice=None if kept else _advice(function.pair),
        ),
        Finding(
            name="negative_control",
            kept=strict.caught,
            sentence=f"the negative control ({control.fault}) was "
            f"{'noticed' if strict.caught else 'not noticed'}",
            measured=finite(control.control.relative),
            advice=None if strict.caught else MORE,
        ),
        _native_finding(function),
    ]
    max_kl, prefill = function.pair.settings.max_kl, strict.compared.prefill
    if max_kl is not None:
        findings.append(_kl_finding(prefill.kl_per_token, max_kl))
    for layer in strict.altering[:1] if function.pair.exact else ():
        sentence = f"{layer} returns its input, but hands on other values than it receives"
        findings.append(Finding(name="handed_on", kept=False, sentence=sentence, place=layer))
    if (count := prefill.predictions) < FEW:
        sentence = f"on only {counted(count, 'prediction')}"
        amount = Finding(name="amount", kept=None, sentence=sentence, measured=count, limit=FEW)
        findings.append(amount)
        amount.advice, amount.in_reason = MORE, True
    return findings


def _advice(pair: Pair) -> str:
    """What to do if the logits differ."""
    if pair.exact and pair.lineage.unknown:
        return (
            "check that this is the model the target was made from, and that the target was not "
            "trained since; keep growkit.json with it, so that the tensor at fault can be named"
        )
    return AGAIN


def _native_finding(function: Function) -> Finding:
    """The finding on logits in the storage dtype."""
    native, exact = function.native, function.pair.exact
    error, limit, dtype = native.compared.largest, native.limit, native.compared.dtype
    kept = native.explained if exact and limit else None
    sentence = f"in {dtype} the source itself computes no usable logits"
    advice = "store the target in a wider dtype, such as --dtype float32"
    if limit:
        explained = f"rounding explains {limit.largest:.1e}"
        sentence = f"in {dtype} the logits differ by {error:.1e} of their scale, {explained}"
        if native.inflation:
            ratio, largest = native.inflation
            sentence += (
                f"; KL to float64 is {ratio:.3g} times the source's, chance explains {largest:.3g}"
            )
            if within(error, limit.largest):
                advice = (
                    f"look for what the target computes less exactly in {dtype} alone, such as a "
                    "norm or a sum; try another --device, or a wider dtype, such as --dtype float32"
                )
    return Finding(
        name="native",
        kept=kept,
        sentence=sentence + native.cause,
        measured=finite(error),
        limit=limit.largest if limit and exact else None,
        advice=advice if kept is False else None,
    )


def _kl_finding(kl: float, max_kl: float) -> Finding:
    """The finding on a limit for the KL, in nats per token."""
    if within(kl, max_kl):
        sentence, advice = f"{kl:.3g} of at most {max_kl:g} nats per token of KL", None
    else:
        sentence = too_much(kl, max_kl)
        advice = "choose options that lose less, such as a higher --rank, or allow more (--max-kl)"
    return Finding(
        name="max_kl",
        kept=within(kl, max_kl),
        sentence=sentence,
        measured=finite(kl),
        limit=max_kl,
        advice=advice,
        verdict="not as asked",
    )


def _sentence(function: Function) -> str:
    """Describe the distance of the logits, or for another function its loss."""
    compared, pair, kept = function.strict.compared, function.pair, function.kept
    distance = compared.prefill
    differ = f"{compared.largest:.1e} of the logit scale in strict float64"
    if pair.exact and kept:
        if all(mode.largest == 0 for mode in compared.distances.values()):
            return "the logits are identical in strict float64"
        return f"the logits differ by at most {differ}"
    if pair.exact:
        module = function.first_difference[1]
        where = f"; the first difference is in {module}" if module else ""
        return f"the logits differ by {differ}{where}"
    if not math.isfinite(distance.relative):
        return "the new model computes NaN or infinite logits"
    if not kept:
        assert function.limit
        stored = "" if pair.lineage.by_ties else f" to {function.native.compared.dtype}"
        return (
            f"the logits differ by {differ}; rounding{stored} explains {function.limit.largest:.1e}"
        )
    count = distance.predictions
    return (
        f"the loss goes from {distance.loss_source / count:.4f} to "
        f"{distance.loss_target / count:.4f} nats per token over "
        f"{counted(count, 'prediction')}, {distance.agreeing / distance.tokens:.1%} of the "
        f"likeliest next tokens are the same, {distance.kl_per_token:.3g} nats per token of KL"
    )


def _fingerprint(function: Function) -> Fingerprint | None:
    """Logits that identify the model: the source's for an exact promise, else the target's."""
    pair, strict, native = function.pair, function.strict, function.native.compared
    side, of = (0, "source") if pair.exact else (1, "target")
    answers = strict.compared.answers[side], native.answers[side]
    model = (pair.before, pair.after)[side]
    return fingerprint(of, strict.side.question, *answers, native.dtype, widest(model))


def device_section(function: Function) -> Section | None:
    """The section on the device; None for a CPU."""
    device, strict, native = function.pair.device, function.strict, function.native
    if device == CPU:
        return None
    versions = (f"{name} {version}" for name, version in driver_versions(device).items())
    name = ", ".join([device_name(device), *versions])
    sentence = f"strict float64 ran on {name}"
    if strict.fault:
        sentence = f"strict float64 ran on the CPU, since on {name} {strict.fault}"
    if native.fault:
        sentence += f"; in {native.compared.dtype}, {native.fault}"
    if varying := function.pair.varying:
        sentence += f"; no deterministic form has {', '.join(varying)}"
    sure = not (strict.fault or native.fault or varying)
    finding = Finding(name="device", kept=sure or None, sentence=sentence, in_reason=not sure)
    return Section(findings=[finding], notes=[])


def fault_of(function: Function, weights: Finding, files: Finding, logits: Finding) -> Fault | None:
    """Where and why the two models differ; None if they do not, or if the promise allows it."""
    pair, lost = function.pair, weights.place
    if not pair.exact or all(finding.kept is not False for finding in (weights, files, logits)):
        return None
    if weights.kept is False and not lost and files.kept is not False:
        return None  # every weight is rounded a little, so no place is at fault
    layer, module = function.first_difference
    embedding = "embedding" if module == function.strict.side.models[1].embedding[0] else None
    fault = Fault(layer=layer, component=embedding)
    if lost:
        fault = tensor_fault(pair.lineage, pair.after, lost, layer)
    elif files.kept is False:
        fault.cause = files.sentence
    if fault.factor is None and not logits.kept:
        close = function.strict.limit.largest + SPACING[function.native.compared.dtype]
        fault.factor = function.strict.compared.prefill.factor(close)
    return fault
