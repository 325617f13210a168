"""The findings of a proof in the order in which they decide, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from growkit.base.limits import within
from growkit.engine.metrics import finite
from growkit.planning.plan import Lineage
from growkit.proof.folder import FolderDifferences
from growkit.proof.modes import PREFILL
from growkit.proof.parts import Native, Strict
from growkit.proof.weights import Recovered
from growkit.results.advice import failed as failed_finding
from growkit.results.proof import Finding, ModeResult, Trainability, TrainingProof
from growkit.results.sentences import counted, recovered_sentence, too_much, trainability_sentence

FEW = 100
"""Predictions below which the verdict reports how few they are."""


VERDICTS = {
    "max_kl": "not as asked",
    "training": "preserved, but it does not learn as its source does",
    "trainability": "preserved, but it cannot train as asked",
}
"""Verdicts on exact promises by the finding that failed, where that is not the promise itself."""

AFTERWARDS = ("max_kl", "training", "trainability")
"""Findings on a target that has kept its promise, which the sentence reports as well."""


def judge_function(
    lineage: Lineage,
    weights: Recovered,
    files: FolderDifferences,
    strict: Strict,
    native: Native,
    modes: Sequence[ModeResult],
    max_kl: float | None,
) -> list[Finding]:
    """Everything that was compared, in the order in which it decides.

    Args:
        lineage: how the target was made.
        weights: what the algebra half found.
        files: the differences next to the weights.
        strict: the comparison in strict float64.
        native: the comparison in the storage dtype.
        modes: the inference modes.
        max_kl: allowed nats per token of KL; None for any number.
    """
    exact, distance = lineage.promise == "exact", strict.compared.prefill
    # Rounding to a narrower dtype may make the target another function.
    limit = strict.tolerance if exact else native.tolerance if lineage.by_rounding else None
    kept = strict.kept_within(limit)
    control = f"the negative control ({strict.probe.fault})"
    found = [
        *_files_and_weights(weights, files, kept=kept, exact=exact),
        finding(
            "strict_float64",
            kept,
            _strict_sentence(strict, limit, native.dtype, kept=kept, exact=exact),
            place=strict.first_difference[1],
            measured=strict.worst[1],
            limit=limit,
        ),
        finding(
            "negative_control",
            strict.caught,
            f"{control} was {'noticed' if strict.caught else 'not noticed'}",
            measured=strict.probe.control.relative,
        ),
        finding(
            "native",
            native.kept if exact else None,
            native.sentence,
            measured=native.largest,
            limit=native.tolerance if exact else None,
        ),
    ]
    if max_kl is not None:
        kl = distance.kl_per_token
        low = within(kl, max_kl)
        amount = f"{kl:.3g} of at most {max_kl:g} nats per token of KL"
        said = amount if low else too_much(kl, max_kl)
        found.append(finding("max_kl", low, said, measured=kl, limit=max_kl))
    for mode in modes:
        said = f"{mode.name}: {'' if mode.tried else 'not tried: '}{mode.note}"
        place = mode.name if mode.kept is False else None
        found.append(finding(mode.name, mode.kept, said, place, mode.relative, mode.tolerance))
    if distance.predictions < FEW:
        few = f"on {counted(distance.predictions, 'prediction')} alone"
        found.append(finding("amount", None, few, measured=distance.predictions, limit=FEW))
    return found


def judge_training(
    training: TrainingProof | None, capacity: Trainability | None, *, wanted: bool
) -> list[Finding]:
    """Source and target trained side by side, and whether the new capacity can train.

    Args:
        training: None if they were not trained.
        capacity: None where nothing is new.
        wanted: whether the new capacity decides.
    """
    found = []
    if training:
        kept, measured = training.kept, training.relative
        found += [finding("training", kept, training.reason, None, measured, training.tolerance)]
    if capacity:
        kept = bool(capacity.trainable) if wanted else None
        said = f"new capacity: {trainability_sentence(capacity)}"
        found.append(finding("trainability", kept, said))
    return found


def finding(
    name: str,
    kept: bool | None,
    sentence: str,
    place: str | None = None,
    measured: float | None = None,
    limit: float | None = None,
) -> Finding:
    """A finding without advice; numbers that are not finite become None."""
    return Finding(
        name=name,
        kept=kept,
        sentence=sentence,
        place=place,
        measured=None if measured is None else finite(measured),
        limit=limit,
        advice=None,
    )


def verdict_of(promise: str, findings: Sequence[Finding], max_kl: float | None) -> str:
    """The verdict in a few words, which follow from the first finding that failed."""
    failed = failed_finding(findings)
    if failed is None and promise == "exact":
        return "preserved"
    if failed is None:
        return "changed as requested" if max_kl is None else "within the limit"
    if failed.name == "negative_control":
        return "no verdict"
    return VERDICTS.get(failed.name, "not preserved") if promise == "exact" else "not as asked"


def reason_of(
    verdict: str, promise: str, lost: str, findings: Sequence[Finding], notes: Sequence[str]
) -> str:
    """The verdict in a sentence.

    Args:
        verdict: in a few words.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what the promise leaves out.
        findings: in the order in which they decide.
        notes: what the verdict does not cover.
    """
    by_name = {each.name: each for each in findings}
    weights, strict = by_name["weights"], by_name["strict_float64"]
    failed = failed_finding(findings)
    parts = []
    if failed:
        # Weights, files and logits explain one another; one of all other failures is enough.
        together = [weights, by_name["files"], strict]
        shown = [each for each in together if each.kept is False] or [failed]
        parts = [each.sentence for each in shown]
    if failed is None or failed.name in AFTERWARDS:
        exact, native = promise == "exact", by_name["native"]
        recovered = f"{weights.sentence}, and " if exact and weights.kept else ""
        parts.append(recovered + strict.sentence)
        parts += [f"but {native.sentence}"] if exact and native.kept is None else []
        if failed != (training := by_name.get("training")) and training:
            parts.append(training.sentence)
    parts += [weights.sentence] if weights.kept is None else []
    parts += notes
    parts += [by_name["amount"].sentence] if "amount" in by_name else []
    given_up = f" ({lost})" if lost and failed is None else ""
    return f"{verdict}{given_up}: {'; '.join(parts)}"


def _files_and_weights(
    weights: Recovered, files: FolderDifferences, *, kept: bool, exact: bool
) -> list[Finding]:
    """The algebra half and the files next to the weights.

    Args:
        weights: what was found.
        files: the differences next to the weights.
        kept: whether no logit shows a difference.
        exact: whether the source's function is promised.
    """
    unseen = ", although no logit of these prompts shows it" if kept and exact else ""
    whole: bool | None = True
    sentence = "every weight is recovered"
    if weights.unknown:
        whole, sentence = None, f"weights were not compared, because {weights.unknown}"
    elif weights.lost:
        does_not = "does not give the source's weights back"
        difference = does_not if exact else "is not what the recipe makes"
        whole, sentence = False, f"tensor {weights.lost} {difference}{unseen}"
    elif weights.unchecked:
        whole, sentence = None, f"{len(weights.unchecked)} tensors could not be checked"
    elif weights.recovered and weights.recovered[0] < weights.recovered[1]:
        sentence = recovered_sentence(*weights.recovered)
    changed = next(iter(files.changed), None)
    return [
        finding("weights", whole, sentence, weights.lost),
        finding("files", not changed, files.sentence + (unseen if changed else ""), changed),
    ]


def _strict_sentence(
    strict: Strict, limit: float | None, dtype: str, *, kept: bool, exact: bool
) -> str:
    """How far logits are apart; of another function, how much it loses."""
    distance, (mode, error) = strict.compared.prefill, strict.worst
    way = "" if mode == PREFILL or not kept else f" ({mode})"
    differ = f"{error:.1e} of the logit scale in strict float64{way}"
    if exact and kept:
        if all(each.largest == 0 for each in strict.compared.distances.values()):
            return "the logits are identical in strict float64"
        return f"the logits differ by at most {differ}"
    if exact:
        module = strict.first_difference[1]
        where = f"; the first difference is in {module}" if module else ""
        return f"the logits differ by {differ}{where}"
    if not math.isfinite(distance.relative):
        return "the new model computes NaN or infinite logits"
    if not kept:
        explained = f"what rounding to {dtype} does to the source itself explains {limit:.1e}"
        return f"the logits differ by {differ}; {explained}"
    count = distance.predictions
    return (
        f"the loss goes from {distance.loss_source / count:.4f} to "
        f"{distance.loss_target / count:.4f} nats per token over {counted(count, 'prediction')}, "
        f"{distance.agreeing / distance.tokens:.1%} of the likeliest next tokens are the same, "
        f"{distance.kl_per_token:.3g} nats per token of KL"
    )
