"""What the parts of a proof found, and the verdict on it in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from growkit.base.limits import within
from growkit.engine.metrics import EPSILON, Distance, finite
from growkit.planning.lineage import Lineage
from growkit.planning.plan import Plan
from growkit.proof.comparison import Compared, Control
from growkit.proof.modes import PREFILL
from growkit.results.proof import CopyDistance, Measured, ModeResult, Spectrum, Trainability
from growkit.results.sentences import counted, recovered_sentence, too_much
from growkit.version import __version__


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


@dataclass(frozen=True)
class Recovered:
    """What the algebra half found.

    Attributes:
        unknown: why it could not look.
        lost: the first tensor that is lost.
        changed: what else is not as it was made; or, if that is not known, as in the source.
        instead: what that is and what it should be, in words; empty if there are no values.
        by_plan: whether that is changed by the plan, and so in every output of it.
        notes: what the verdict does not cover, in words.
        recomputed_sources: number of source tensors that survive only in computed targets.
        spectra: of projections that share bases.
        unchecked: number of tensors that could not be held against anything.
        recovered: how many of the source's tensors come back, of how many; None where one is lost,
            or that is not known.
    """

    unknown: str | None = None
    lost: str | None = None
    changed: str | None = None
    instead: str = ""
    by_plan: bool = False
    notes: Sequence[str] = ()
    recomputed_sources: int = 0
    spectra: Sequence[Spectrum] = ()
    unchecked: int = 0
    recovered: tuple[int, int] | None = None

    @property
    def is_not(self) -> str:
        """How a sentence ends that begins with what was changed."""
        if self.unknown or self.by_plan:
            return f"is not what it is in the source{self.instead}"
        return f"is not what growkit {__version__} writes{self.instead}"

    @property
    def told(self) -> str:
        """How a verdict ends: with what it does not cover."""
        weights = [f"weights were not compared, because {self.unknown}"] if self.unknown else []
        return "".join(f"; {note}" for note in (*weights, *self.notes))

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
class Difference:
    """Where two models first part: a layer's index, a module's name, or neither."""

    layer: int | None = None
    module: str | None = None


@dataclass(frozen=True)
class Strict:
    """What the strict comparison found.

    Attributes:
        compared: source and target.
        rounding: what rounding in float64 does to the source's logits, relative to their scale.
        margin: how many times as much the target may differ.
        control: the deliberate fault.
        trainability: of the copies, if there are any, or if it was asked for.
        symmetry: how far the gradients of copies are apart.
        exact: whether nothing more than rounding is promised.
        notes: what gradients could not be looked at, in words.
    """

    compared: Compared
    rounding: float
    margin: float
    control: Control
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
        return self.margin * max(self.rounding, EPSILON)

    @property
    def why(self) -> str:
        """Where the tolerance comes from."""
        return (
            f"{self.margin} times what one rounded sum per layer does to the source itself, "
            f"{self.rounding:.1e}"
        )

    @property
    def worst_mode(self) -> str:
        """The inference mode that shows the largest difference; a NaN is larger than all."""
        found = self.compared.distances.items()
        return max(found, key=lambda m: (not math.isfinite(m[1].relative), m[1].relative))[0]

    @property
    def kept(self) -> bool:
        """Nothing differs by more than rounding, however the models are asked."""
        found = self.compared.distances.values()
        return all(within(each.relative, self.tolerance) for each in found)

    def kept_within(self, limit: float | None) -> bool:
        """Whether nothing differs by more than may be, however the models are asked.

        Args:
            limit: relative to the scale of the logits; None for any number.
        """
        found = [each.relative for each in self.compared.distances.values()]
        return all(within(each, limit) for each in found)

    @property
    def caught(self) -> bool:
        """The deliberate fault was noticed."""
        return not within(self.control.distance.relative, self.tolerance)

    @property
    def difference(self) -> Difference:
        """Where the models part, if they should not."""
        if self.kept or not self.exact:
            return Difference()
        layers = self.compared.by_layer
        for index, (name, error) in enumerate(layers):
            if not within(error, self.tolerance):
                return Difference(index - 1 if index else None, name)
        return Difference(None, self.compared.head if layers else None)


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
        return max(self._relative, key=lambda each: (math.isnan(each), each))

    @property
    def _relative(self) -> list[float]:
        """Of every way to ask in which the source answers with numbers."""
        return [each.relative for each in self.compared.distances.values() if each.usable]

    def loss(self, *, target: bool) -> float | None:
        """Mean negative log-likelihood in nats per token, of the target or of the source."""
        found = self.compared.prefill
        return finite((found.loss_target if target else found.loss_source) / found.predictions)

    def measured(self, exact: bool) -> Measured:
        """The figures, as they are reported; without a tolerance if nothing exact is promised."""
        tolerance = self.tolerance if exact else None
        return self.compared.prefill.measured(
            self.dtype, self.device, tolerance, self.why if tolerance is not None else None
        )


def within_limit(distance: Distance, max_kl: float | None) -> tuple[bool, str]:
    """Whether no more is lost than may be, and that in words; a NaN is more than any limit."""
    kl = distance.kl_per_token
    if max_kl is None or within(kl, max_kl):
        return True, ""
    return False, too_much(kl, max_kl)


def other_reason(
    weights: Recovered,
    strict: Strict,
    lineage: Lineage,
    limit: float | None,
    dtype: str,
    max_kl: float | None,
) -> str:
    """The verdict on what was asked to be another function.

    Args:
        weights: what the algebra half found.
        strict: what the comparison found.
        lineage: how the target was made.
        limit: what the logits may differ by, relative to their scale; None for any number.
        dtype: whose rounding explains as much.
        max_kl: nats per token of KL that are allowed; None for any number.
    """
    if weights.lost:
        return f"not as asked: tensor {weights.lost} is not what the recipe makes"
    if weights.changed:
        return f"not as asked: {weights.changed} is not what growkit wrote{weights.told}"
    if not strict.caught:
        return f"no verdict: the negative control ({strict.control.fault}) was not noticed"
    distance = strict.distance
    if not math.isfinite(distance.relative):
        return "not usable: the new model computes NaN or infinite logits"
    if not strict.kept_within(limit):
        return (
            f"not as asked: the logits differ by {_strict_error(strict)}; what rounding to {dtype} "
            f"does to the source itself explains {limit:.1e}"
        )
    unchecked = f"; {weights.unchecked} tensors could not be checked" if weights.unchecked else ""
    low, found_kl = within_limit(distance, max_kl)
    verdict = "changed as requested" if max_kl is None else "within the limit"
    if not low:
        verdict = f"not as asked: {found_kl}; changed"
    return (
        f"{verdict} ({lineage.lost}): the loss goes from "
        f"{distance.loss_source / distance.predictions:.4f} to "
        f"{distance.loss_target / distance.predictions:.4f} nats per token over "
        f"{counted(distance.predictions, 'prediction')}, "
        f"{distance.agreeing / distance.tokens:.1%} of the likeliest next tokens are the same, "
        f"{distance.kl_per_token:.3g} nats per token of KL{unchecked}{weights.told}"
    )


def exact_reason(
    weights: Recovered, strict: Strict, native: Native, in_use: Sequence[ModeResult]
) -> str:
    """The verdict on what was promised to be the same function."""
    failed = [way for way in in_use if way["kept"] is False]
    if not strict.kept:
        return _where_it_differs(weights, strict)
    if weights.lost or weights.changed:
        return _what_was_changed(weights)
    if not strict.caught:
        return f"no verdict: the negative control ({strict.control.fault}) was not noticed"
    if not native.kept:
        return (
            f"not preserved in {native.dtype}: the logits differ by "
            f"{native.largest:.1e} of their scale, rounding explains {native.tolerance:.1e}"
        )
    if failed:
        return f"not preserved: {failed[0]['name']}: {failed[0]['note']}"
    half = "" if weights.unknown else "every weight is recovered, and "
    if weights.recovered and weights.recovered[0] < weights.recovered[1]:
        half = f"{recovered_sentence(*weights.recovered)}, and "
    verdict = f"preserved: {half}the logits {_at_most(strict)}"
    if native.tolerance is None:
        verdict += f"; but in {native.dtype} the source itself computes no usable logits"
    return verdict + weights.told


def _what_was_changed(weights: Recovered) -> str:
    if weights.lost:
        return (
            f"not preserved: tensor {weights.lost} does not give the source's weights back, "
            "although no logit of these prompts shows it"
        )
    return (
        f"not preserved: {weights.changed} {weights.is_not}, although no logit of these prompts "
        f"shows it{weights.told}"
    )


def _where_it_differs(weights: Recovered, strict: Strict) -> str:
    module = strict.difference.module
    where = f"; the first difference is in {module}" if module else ""
    if weights.lost:
        where += f", and tensor {weights.lost} is not what it should be"
    elif weights.changed:
        where += f", and {weights.changed} {weights.is_not}"
    return f"not preserved: the logits differ by {_strict_error(strict)}{where}{weights.told}"


def _at_most(strict: Strict) -> str:
    if all(each.largest == 0 for each in strict.compared.distances.values()):
        return "are identical in strict float64"
    return f"differ by at most {_strict_error(strict)}"


def _strict_error(strict: Strict) -> str:
    mode = strict.worst_mode
    error = strict.compared.distances[mode].relative
    return f"{error:.1e} of the logit scale in strict float64" + (
        "" if mode == PREFILL or strict.kept else f" ({mode})"
    )
