"""The algebra half of the proof: the source's weights are recovered from the target's weights.

Prompts do not use most rows of an embedding, and a change in such a row changes no logit.
Collapsing the written tensors (W = L W' E) checks every element of every tensor.

The manifest records how the target was made, and is not trusted. Its recipe is planned again, but
may not make growkit read files outside the two folders, nor start a search: manifests that growkit
writes contain the results of searches.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from shlex import quote

from torch import Tensor

from growkit.base.errors import InputError, plain, reason
from growkit.base.tensors import (
    TensorInfo,
    parts,
    same_numbers,
    total_bytes,
    total_parameters,
    widened,
)
from growkit.base.workers import workers
from growkit.engine.class_weights import ClassWeights, class_weights
from growkit.engine.lending import LARGE
from growkit.engine.loader import loading
from growkit.engine.recipe_planning import plan_recipe
from growkit.engine.user_family import described_family
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.checkpoint.reading import Checkpoint, RoundedCheckpoint, Widened
from growkit.model.checkpoint.writing import keep_freed
from growkit.model.families.family import unlisted_family
from growkit.model.model import Model
from growkit.planning.manifest import read_record, without_searches
from growkit.planning.plan import Lineage, LostError, Plan, Rule
from growkit.planning.recipe import Recipe
from growkit.planning.router_ties import lost_in_ties
from growkit.proof.config_comparison import experts_by_config
from growkit.results.proof_result import (
    AGAIN,
    Finding,
    Spectrum,
    WeightsSection,
    recovered_sentence,
)


def lineage_of(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> Lineage:
    """Find out how the target was made, from the recipe in its manifest.

    Args:
        before: the source.
        after: the target.
        recipe: the recipe in the target's manifest.
    """
    if recipe is None:
        return _without_plans(before, after, "no manifest records how the target was made")
    unfit = "the recipe in the target's manifest does not fit this source"
    try:
        described = before.with_family(described_family(unlisted_family(recipe.family)))
        lineage = plan_recipe(without_searches(recipe, after), described).lineage
    except InputError as error:
        return _without_plans(before, after, f"{unfit} ({error})")
    except Exception as error:  # untrusted values may raise anything
        why = f"{unfit} ({type(error).__name__}: {plain(reason(error))})"
        return _without_plans(before, after, why)
    if recipe.file_format and not (before.stands_alone and after.stands_alone):
        return Lineage(lineage.source, (), unknown="files of other programs are compared")
    return lineage


def allow_blocks(lineage: Lineage, after: Checkpoint) -> Lineage:
    """An unknown lineage of which blocks of few bits are no fault, as the KL has a limit."""
    if not after.in_blocks:
        return lineage
    return replace(lineage, promise="bounded", lost="weights are rounded to blocks of few bits")


def _without_plans(before: Checkpoint, after: Checkpoint, unknown: str) -> Lineage:
    """An unknown lineage: exact, except for ties of experts if there are more."""
    experts, keys = experts_by_config(before.config, before.described)
    numbers = [(before.config.get(key), after.config.get(key)) for key in keys]
    more = any(type(old) is type(new) is int and old < new for old, new in numbers)
    lost = lost_in_ties(before, experts, "experts", "copies") if experts and more else ""
    promise = "bounded" if lost else "exact"
    return Lineage(before, (), promise, lost, by_ties=bool(lost), unknown=unknown)


def check_order(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> None:
    """Refuse a source that was made from the target, according to its manifest.

    Exchanged models of an exact growth still compute the same function, but their weights could not
    be compared. Weights of the same shapes can be compared in any order.

    Args:
        before: the model that was given as the source.
        after: the model that was given as the target.
        recipe: the recipe in the target's manifest.

    Raises:
        InputError: the source's recipe makes the source from the target, and the target's recipe
            does not make the target from the source.
    """
    record = None
    with suppress(InputError):  # a source's manifest may be anything
        record = read_record(before.opened)
    if record is None or _shapes(before.tensors) == _shapes(after.tensors):
        return
    if _explains(before, after, recipe) or not _explains(after, before, record):
        return
    raise InputError(
        f"the arguments seem to be swapped: according to its {MANIFEST}, {before.folder} was "
        f"made from a model like {after.folder}; the source comes first: "
        f"growkit verify {quote(str(after.folder))} {quote(str(before.folder))} (or remove that "
        "file to compare the two as models of unknown origin)"
    )


def _explains(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> bool:
    """Whether a recipe makes tensors with the second model's names and shapes from the first."""
    plans = lineage_of(before, after, recipe).plans
    if not plans:
        return False
    planned = {name: rule.info for name, rule in plans[-1].by_target.items()}
    return _shapes(planned) == _shapes(after.tensors)


def _shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(info.shape) for name, info in tensors.items()}


def as_planned(before: Checkpoint, lineage: Lineage) -> Checkpoint:
    """The source to compare with the target: rounded if the recipe rounds it."""
    planned = lineage.source
    before = before.with_family(planned.described)
    narrower = planned.rounded if isinstance(planned, Widened) else None
    return RoundedCheckpoint(before, narrower) if narrower else before


FARTHEST = 0.5
"""Largest distance of a row in blocks of few bits, in norms of the source's: an unrelated row of
the same norm is about √2 away, a row of zeros 1."""

AS_FACTOR, AS_FACTOR_OF_DISTANCE, AS_FACTOR_AT_MOST = 0.125, 2.0, 0.7
"""Largest part of this distance that may be a factor, and what is added for every unit of it. It is
the distance itself, squared, of blocks whose scales are fitted by least squares; those of all types
of GGUF have at most two thirds of the limit (measured)."""


@dataclass(frozen=True)
class Recovered:
    """Results of the algebra half.

    Attributes:
        unknown: the reason why weights were not compared; None if they were.
        lost: a tensor of the target from which its source is not recovered bit for bit, that a
            check refuses, or that should not exist; or a source tensor that is not recovered.
        recomputed_sources: number of source tensors that survive only in computed targets.
        spectra: spectra of projections that share bases, up to the first that a check refuses.
        unchecked: tensors that could not be checked, because later steps computed new tensors from
            them, or because they were made from tensors whose bits depend on the machine.
        recovered: number of recovered source tensors, and number of all; None if a tensor is lost
            or the origin is unknown. Dropped tensors, which models compute, are not included.
        different: if the origin is unknown, the first parameter that is not the source's, although
            it has the same shape.
        converted: whether another program converted the source to the target's format, in which no
            weight may differ.
        in_blocks: distances of the tensors that are stored in blocks of few bits and are near the
            source's: of each, the largest of any row, in norms of the source's row.
    """

    unknown: str | None = None
    lost: str | None = None
    recomputed_sources: int = 0
    spectra: Sequence[Spectrum] = ()
    unchecked: Sequence[str] = ()
    recovered: tuple[int, int] | None = None
    different: str | None = None
    converted: bool = False
    in_blocks: Sequence[float] = ()

    @property
    def all_recovered(self) -> bool:
        """Whether every weight was recovered, so that no weight can be at fault."""
        known = not (self.unknown or self.unchecked or self.recomputed_sources or self.spectra)
        return known and self.lost is None and not self.in_blocks

    def section(self, promise: str, before: Checkpoint, after: Checkpoint) -> WeightsSection:
        """The section on the weights of a source and its target, for a promise."""
        used = [
            {k: v for k, v in model.tensors.items() if k not in loading(model).unread}
            for model in (before, after)
        ]
        recovered, tensors = self.recovered or (None, None)
        return WeightsSection(
            findings=[self.finding(promise)],
            notes=[],
            recovered=None if self.unknown else self.lost is None and not self.in_blocks,
            first_lost_tensor=self.lost,
            tensors_recovered=recovered,
            source_tensors=tensors,
            spectra=list(self.spectra),
            kl_by_rank=[],
            source_parameters=total_parameters(used[0]),
            parameters=total_parameters(used[1]),
            source_bytes=total_bytes(used[0]),
            bytes=total_bytes(used[1]),
        )

    def finding(self, promise: str) -> Finding:
        """The finding on the weights, for a promise."""
        kept: bool | None = True
        sentence = "every weight is recovered"
        if self.different:
            kept, sentence = None, f"{self.different} is not as in the source, and {self.unknown}"
        elif self.unknown:
            kept, sentence = None, f"weights were not compared, because {self.unknown}"
        elif self.lost:
            does_not = "does not yield the source's weights"
            by_recipe = promise != "exact" and not self.converted
            difference = "is not what the recipe makes" if by_recipe else does_not
            kept, sentence = False, f"tensor {self.lost} {difference}"
        elif self.in_blocks:
            kept, sentence = (
                False if promise == "exact" else None,
                (
                    f"{len(self.in_blocks)} weights are rounded to blocks of few bits, at most "
                    f"{max(self.in_blocks):.1e} of the norm of a row, and every other is recovered"
                ),
            )
        elif self.unchecked:
            kept, sentence = None, f"{len(self.unchecked)} tensors could not be checked"
        elif self.recovered and self.recovered[0] < self.recovered[1]:
            sentence = recovered_sentence(*self.recovered)
        place = self.lost or self.different
        finding = Finding(name="weights", kept=kept, sentence=sentence, place=place)
        finding.in_reason = kept is None
        if self.in_blocks and not self.lost:
            finding.advice = "judge by the KL whether that is near enough, or take wider blocks"
        elif kept is False:
            remedy = "convert the source again" if self.converted else AGAIN
            finding.advice = "copy the target's weights again, in case they were damaged on the way"
            finding.advice += f"; or {remedy}"
        return finding


def compare_weights(lineage: Lineage, target: Model) -> Recovered:
    """Compare every written tensor with its rule.

    Args:
        lineage: how the target was made.
        target: the written weights.
    """
    if lineage.unknown:
        return _compare_directly(lineage, target)
    plans = lineage.plans
    if lost := _first_lost(lineage, target):
        return Recovered(lost=lost)
    spectra: list[Spectrum] = []
    unchecked: list[str] = []
    for index in range(len(plans)):
        if lost := _first_refused(lineage, index, target, spectra, unchecked):
            return Recovered(lost=lost, spectra=spectra)
    if lineage.promise != "different" and (again := plans[-1].again):
        return _made_again(lineage, again(target))
    wanted = lineage.source.tensors.keys() - plans[0].dropped.keys()
    recovered = wanted & {lineage.origin(rule.target) for rule in plans[-1].rules}
    return Recovered(
        recomputed_sources=sum(len(plan.recomputed_sources) for plan in plans),
        spectra=spectra,
        unchecked=unchecked,
        recovered=(len(recovered), len(wanted)),
    )


def _made_again(lineage: Lineage, again: Lineage) -> Recovered:
    """Compare a source with what is made again from its target.

    Args:
        lineage: how the target was made.
        again: how a source is made from the target, which differs from machine to machine in what
            is not repeatable.
    """
    before = Lineage(lineage.source, lineage.plans[:-1]).target
    names = [name for name in again.target.tensors if again.repeatable(name)]
    with workers(os.cpu_count() or 1) as pool:
        same = [*pool.map(partial(_same, before, again.target), names)]
    if not all(same):
        return Recovered(lost=names[same.index(False)])
    return Recovered(recovered=(len(names), len(names)))


def _same(one: Model, other: Model, name: str) -> bool:
    """Whether two models have the same numbers in a tensor."""
    return all(
        same_numbers(one.read(name, rows), other.read(name, rows)) for rows in parts(other, name)
    )


def _compare_directly(lineage: Lineage, target: Model) -> Recovered:
    """Compare the parameters of two classes, if they have the same names and shapes."""
    before, after = class_weights(lineage.source), class_weights(target)
    shapes = [{name: info.shape for name, info in of.tensors.items()} for of in (before, after)]
    if shapes[0] != shapes[1]:
        return Recovered(unknown=lineage.unknown)
    in_blocks = dict[str, float]()
    for name in before.tensors:
        for rows in parts(before, name):
            was, now = before.read(name, rows), after.read(name, rows)
            if not same_numbers(was, now):
                if name in after.in_blocks and (away := _distance(was, now)) < FARTHEST:
                    in_blocks[name] = max(away, in_blocks.get(name, 0.0))
                    continue
                stored = after.stored_as(name) if isinstance(after, ClassWeights) else None
                if isinstance(target, Checkpoint) and is_converted(target):
                    return Recovered(lost=stored or name, converted=True)
                return Recovered(unknown=lineage.unknown, different=stored or name)
    if in_blocks:
        return Recovered(in_blocks=[*in_blocks.values()])
    return Recovered(recovered=(len(before.tensors), len(before.tensors)))


def is_converted(target: Checkpoint) -> bool:
    """Whether a model of unknown origin can only be a source that was converted or quantised."""
    return bool(target.quantised) or not target.format.read_by_transformers


def _distance(was: Tensor, now: Tensor) -> float:
    """The largest distance of two rows, in norms of the first; infinite from rows of zeros.

    It is also infinite if a matrix has a factor, such as that of a wrong scale.
    """
    one, other = widened(was).double(), widened(now).double()
    if has_factor(one, other):
        return math.inf
    away, size = (of.norm(dim=-1) for of in (other - one, one))
    return float((away / size)[away > 0].amax())


def has_factor(one: Tensor, other: Tensor) -> bool:
    """Whether more of the distance of a matrix is a factor than blocks have, which round both ways.

    Args:
        one: the matrix, or several, such as one for each expert.
        other: the matrix that is stored in blocks.
    """
    matrix = tuple(range(-min(one.dim(), 2), 0))
    squares = one.square().sum(matrix)
    factor = (one * other).sum(matrix) / squares
    distance = ((other - one).square().sum(matrix) / squares).sqrt()
    part = (AS_FACTOR + AS_FACTOR_OF_DISTANCE * distance).clamp(max=AS_FACTOR_AT_MOST)
    return bool(((factor - 1).abs() > part * distance).any())


def _first_refused(
    lineage: Lineage, index: int, target: Model, spectra: list[Spectrum], unchecked: list[str]
) -> str | None:
    """Find the first tensor that a check of a plan refuses.

    Args:
        lineage: how the target was made.
        index: index of the plan.
        target: the written weights.
        spectra: receives the spectra of the plan's checks.
        unchecked: receives the tensors that could not be checked.
    """
    plan = lineage.plans[index]
    earlier = Lineage(lineage.source, lineage.plans[:index])
    later = Lineage(target, lineage.plans[index + 1 :])
    written = _written(plan, later.plans) if plan.checks else {}
    for check in plan.checks:
        if not (written.keys() >= {*check.targets} and all(map(earlier.repeatable, check.sources))):
            unchecked += check.targets
            continue
        targets = []
        for name in check.targets:
            recovered = _recovered(target, written[name], plan.by_target[name].info, later)
            if recovered is None:
                return written[name][0]
            targets.append(recovered)
        kept, spectrum = check.judge([earlier.target.read(name) for name in check.sources], targets)
        spectra.append(spectrum)
        if not kept:
            return written[check.targets[0]][0]
    return None


def _written(plan: Plan, later: Sequence[Plan]) -> dict[str, list[str]]:
    """For the targets of a plan, the written tensors from which they can be recovered."""
    names = {rule.target: [rule.target] for rule in plan.rules}
    for step in later:
        became: dict[str, list[str]] = {}
        for rule in step.rules:
            if rule.transform.holds:
                became.setdefault(rule.sources[0], []).append(rule.target)
        names = {
            name: [target for current in now for target in became.get(current, ())]
            for name, now in names.items()
        }
    return {name: now for name, now in names.items() if now}


def _recovered(
    target: Model, names: Sequence[str], info: TensorInfo, later: Lineage
) -> Tensor | None:
    """Recover a tensor from all these written tensors; None if they do not agree."""
    recovered: Tensor | None = None
    for name in names:
        try:
            back = later.recovered(target, name)(slice(0, info.shape[0]))
        except LostError:
            return None
        if not (recovered is None or back.equal(recovered)):
            return None
        recovered = back
    return recovered


def _first_lost(lineage: Lineage, target: Model) -> str | None:
    """Find the first tensor that does not follow its rule, is unexpected, or is not recovered."""
    last = lineage.plans[-1]
    keep_freed(LARGE)
    with workers(os.cpu_count() or 1) as pool:
        verdicts = pool.map(partial(_sound, lineage, target), last.rules)
        for rule, sound in zip(last.rules, verdicts, strict=True):
            if not sound:
                return rule.target
    recovered = {lineage.origin(name) for name in last.by_target}
    wanted = lineage.source.tensors.keys() - lineage.plans[0].dropped.keys()
    wanted -= _recomputed_sources(lineage.plans)
    return min((target.tensors.keys() - last.by_target.keys()) | (wanted - recovered), default=None)


def _sound(lineage: Lineage, target: Model, rule: Rule) -> bool:
    """Whether the written tensor follows its rule."""
    name, source = rule.target, lineage.source
    if target.tensors.get(name) != rule.info:
        return False
    origin = lineage.origin(name)
    if origin is None:
        # Computed, not arranged: nothing can be recovered, but it can be computed again.
        return not lineage.repeatable(name) or same_numbers(
            lineage.target.read(name), target.read(name)
        )
    recovered = lineage.recovered(target, name)
    pieces = parts(source, origin, rule.info.elements)  # large tensors part by part
    try:
        return all(same_numbers(recovered(rows), source.read(origin, rows)) for rows in pieces)
    except LostError:
        return False


def _recomputed_sources(plans: Sequence[Plan]) -> set[str]:
    """Source tensors that cannot be recovered, because they are recomputed or dropped."""
    names: set[str] = set()
    for plan in reversed(plans):
        sources = {rule.target: rule.sources for rule in plan.rules}
        names = {source for name in names for source in sources.get(name, ())}
        names |= plan.recomputed_sources.keys() | plan.dropped.keys()
    return names
