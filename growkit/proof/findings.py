"""The findings of a proof in the order in which they decide, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from growkit.base.limits import within
from growkit.engine.metrics import EPSILON, Distance, finite
from growkit.planning.lineage import Lineage
from growkit.planning.plan import Plan
from growkit.proof.comparison import Compared, Probe
from growkit.proof.modes import PREFILL
from growkit.results.advice import failed as failed_finding
from growkit.results.proof import (
    CopyDistance,
    Finding,
    Measured,
    ModeResult,
    Spectrum,
    Trainability,
    TrainingProof,
)
from growkit.results.sentences import counted, recovered_sentence, too_much, trainability_sentence
from growkit.version import __version__

FEW = 100
"""Predictions below which the verdict reports how few they are."""


@dataclass(frozen=True)
class Origin:
    """How the target was made; or, in words, why that is unknown."""

    lineage: Lineage | None = None
    unknown: str | None = None

    @property
    def plans(self) -> Sequence[Plan]:
        """Of all steps, as far as they are known."""
        return self.lineage.plans if self.lineage else ()

    @property
    def layers(self) -> Sequence[int | None] | None:
        """Which layers of the source those of the target compute, if they are not the same."""
        return self.lineage.layers if self.lineage else None

    @property
    def promise(self) -> str:
        """What the target is held to: to be exact, if nothing is known."""
        return self.lineage.promise if self.lineage else "exact"

    @property
    def lost(self) -> str:
        """What the promise leaves out, in one line; empty if nothing."""
        return self.lineage.lost if self.lineage else ""

    @property
    def by_rounding(self) -> bool:
        """Whether nothing but rounding to a narrower dtype makes the target another function."""
        return bool(self.lineage and self.lineage.by_rounding) and self.promise != "exact"


@dataclass(frozen=True)
class Recovered:
    """What the algebra half found.

    Attributes:
        unknown: why it could not look.
        lost: a tensor of the target that does not give its source back, bit for bit, that a check
            refuses, or that should not be there; or a tensor of the source that none gives back.
        changed: what else is not as it was made; or, if that is not known, as in the source.
        instead: what that is and what it should be, in words; empty if there are no values.
        by_plan: whether that is changed by the plan, and so in every output of it.
        notes: what the verdict does not cover, in words.
        recomputed_sources: number of source tensors that survive only in computed targets.
        spectra: of projections that share bases, up to the first that a check refuses.
        unchecked: tensors that no check could look at, because what is left of them was computed
            once more, or they were made from tensors whose bits depend on the machine.
        recovered: how many of the source's tensors come back, of how many; None where one is lost,
            or that is not known. Tensors that are dropped, since models compute them, do not count.
    """

    unknown: str | None = None
    lost: str | None = None
    changed: str | None = None
    instead: str = ""
    by_plan: bool = False
    notes: Sequence[str] = ()
    recomputed_sources: int = 0
    spectra: Sequence[Spectrum] = ()
    unchecked: Sequence[str] = ()
    recovered: tuple[int, int] | None = None

    @property
    def is_not(self) -> str:
        """How a sentence ends that begins with what was changed."""
        if self.unknown or self.by_plan:
            return f"is not what it is in the source{self.instead}"
        return f"is not what growkit {__version__} writes{self.instead}"

    @property
    def settled(self) -> bool:
        """Every weight gives the source's back, and nothing else is left to be found in one."""
        known = not (self.unknown or self.unchecked or self.recomputed_sources or self.spectra)
        return known and self.kept

    @property
    def kept(self) -> bool:
        """Nothing is lost or changed, as far as it could look."""
        return self.lost is None and self.changed is None


@dataclass(frozen=True)
class FirstDifference:
    """Where two models first part: a layer's index, a module's name, or neither."""

    layer: int | None = None
    module: str | None = None


@dataclass(frozen=True)
class Strict:
    """What the strict comparison found.

    Attributes:
        compared: source and target.
        probe: rounding in float64 and its effect on the source's logits; the deliberate fault.
        margin: how many times as much as by rounding the target may differ.
        trainability: of the copies, if there are any, or if it was asked for.
        symmetry: how far the gradients of copies are apart.
        exact: whether nothing more than rounding is promised.
        notes: what gradients could not be looked at, in words.
    """

    compared: Compared
    probe: Probe
    margin: float
    trainability: Trainability | None
    symmetry: list[CopyDistance]
    exact: bool
    notes: Sequence[str] = ()

    @property
    def distance(self) -> Distance:
        """Between the logits of all prompts."""
        return self.compared.prefill

    @property
    def tolerance(self) -> float:
        """What the logits may differ by, relative to their scale."""
        return self.margin * max(self.probe.rounding.relative, EPSILON)

    @property
    def why(self) -> str:
        """Where the tolerance comes from."""
        return (
            f"{self.margin} times what one rounded sum per layer does to the source itself, "
            f"{self.probe.rounding.relative:.1e}"
        )

    @property
    def worst(self) -> tuple[str, float]:
        """The inference mode with the largest relative difference, and that; NaN is largest."""
        found = [(name, each.relative) for name, each in self.compared.distances.items()]
        return max(found, key=lambda mode: (not math.isfinite(mode[1]), mode[1]))

    @property
    def kept(self) -> bool:
        """Whether every inference mode differs by no more than rounding."""
        return self.kept_within(self.tolerance)

    def kept_within(self, limit: float | None) -> bool:
        """Whether every inference mode is within a limit.

        Args:
            limit: relative to the scale of the logits; None for any finite difference.
        """
        return all(within(each.relative, limit) for each in self.compared.distances.values())

    @property
    def caught(self) -> bool:
        """The deliberate fault was noticed."""
        return not within(self.probe.control.relative, self.tolerance)

    @property
    def difference(self) -> FirstDifference:
        """Where the models part, if they should not."""
        if self.kept or not self.exact:
            return FirstDifference()
        layers = self.compared.by_layer
        for index, (name, error) in enumerate(layers):
            if not within(error, self.tolerance):
                return FirstDifference(index - 1 if index else None, name)
        return FirstDifference(None, self.compared.head if layers else None)


@dataclass(frozen=True)
class Native:
    """What the comparison in the storage dtype found.

    Attributes:
        compared: source and target.
        dtype: torch name of the dtype.
        device: ``cpu`` or the name of the GPU.
        own: the source in this dtype against itself in strict float64.
        tolerance: what the target's may be; None if the source computes nothing usable, so that
            there is nothing to keep.
        why: where the tolerance comes from.
    """

    compared: Compared
    dtype: str
    device: str
    own: Distance
    tolerance: float | None
    why: str

    @property
    def kept(self) -> bool:
        """The target adds no more than rounding, however the source can be asked."""
        tolerance = self.tolerance
        return tolerance is None or all(within(each, tolerance) for each in self._relative)

    @property
    def largest(self) -> float:
        """The largest relative difference of a logit; NaN where one is not finite."""
        return max(self._relative, key=lambda each: (math.isnan(each), each), default=math.nan)

    @property
    def _relative(self) -> list[float]:
        """Of every way to ask in which the source answers with numbers."""
        return [each.relative for each in self.compared.distances.values() if each.usable]

    @property
    def sentence(self) -> str:
        """The finding in words."""
        if self.tolerance is None:
            return f"in {self.dtype} the source itself computes no usable logits"
        return (
            f"in {self.dtype} the logits differ by {self.largest:.1e} of their scale, rounding "
            f"explains {self.tolerance:.1e}"
        )

    def measured(self, exact: bool) -> Measured:
        """The figures, as they are reported; without a tolerance if nothing exact is promised."""
        tolerance = self.tolerance if exact else None
        return self.compared.prefill.measured(
            self.dtype, self.device, tolerance, self.why if tolerance is not None else None
        )


VERDICTS = {
    "max_kl": "not as asked",
    "training": "preserved, but it does not learn as its source does",
    "trainability": "preserved, but it cannot train as asked",
}
"""Verdicts on exact promises by the finding that failed, where that is not the promise itself."""

AFTERWARDS = ("max_kl", "training", "trainability")
"""Findings on a target that has kept its promise, which the sentence reports as well."""


def judge_function(
    origin: Origin,
    weights: Recovered,
    strict: Strict,
    native: Native,
    modes: Sequence[ModeResult],
    max_kl: float | None,
) -> list[Finding]:
    """Everything that was compared, in the order in which it decides.

    Args:
        origin: how the target was made.
        weights: what the algebra half found.
        strict: the comparison in strict float64.
        native: the comparison in the storage dtype.
        modes: the inference modes.
        max_kl: allowed nats per token of KL; None for any number.
    """
    exact, distance = origin.promise == "exact", strict.distance
    limit = strict.tolerance if exact else native.tolerance if origin.by_rounding else None
    kept = strict.kept_within(limit)
    control = f"the negative control ({strict.probe.fault})"
    found = [
        *_files_and_weights(weights, kept=kept, exact=exact),
        finding(
            "strict_float64",
            kept,
            _strict_sentence(strict, limit, native.dtype, kept=kept, exact=exact),
            place=strict.difference.module,
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
            native.kept if exact and native.tolerance is not None else None,
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
        said, place = f"{mode.name}: {mode.note}", mode.name if mode.kept is False else None
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


def _files_and_weights(weights: Recovered, *, kept: bool, exact: bool) -> list[Finding]:
    """The algebra half and the files next to the weights.

    Args:
        weights: what was found.
        kept: whether no logit shows a difference.
        exact: whether the source's function is promised.
    """
    unseen = ", although no logit of these prompts shows it" if kept and exact else ""
    whole, said = True if not weights.unknown else None, "every weight is recovered"
    if weights.unknown:
        said = f"weights were not compared, because {weights.unknown}"
    elif weights.lost:
        whole, does_not = False, "does not give the source's weights back"
        said = f"tensor {weights.lost} {does_not if exact else 'is not what the recipe makes'}"
    elif weights.unchecked:
        whole, said = None, f"{len(weights.unchecked)} tensors could not be checked"
    elif weights.recovered and weights.recovered[0] < weights.recovered[1]:
        said = recovered_sentence(*weights.recovered)
    files = "the files next to the weights are as they should be"
    if weights.changed:
        files = f"{weights.changed} {weights.is_not}{unseen}"
    return [
        finding("weights", whole, said + (unseen if whole is False else ""), weights.lost),
        finding("files", weights.changed is None, files, weights.changed),
    ]


def _strict_sentence(
    strict: Strict, limit: float | None, dtype: str, *, kept: bool, exact: bool
) -> str:
    """How far logits are apart; of another function, how much it loses."""
    distance, (mode, error) = strict.distance, strict.worst
    way = "" if mode == PREFILL or not kept else f" ({mode})"
    differ = f"{error:.1e} of the logit scale in strict float64{way}"
    if exact and kept:
        if all(each.largest == 0 for each in strict.compared.distances.values()):
            return "the logits are identical in strict float64"
        return f"the logits differ by at most {differ}"
    if exact:
        module = strict.difference.module
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
