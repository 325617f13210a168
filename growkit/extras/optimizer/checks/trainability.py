"""Can the new capacity train? Copies that receive equal gradients stay equal forever.

Only gradients above rounding are compared. For example, a constant that is added to all keys
changes no softmax, so that without rotation the gradient of a key bias is only rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING, IndexMap
from growkit.algebra.growth_law import take
from growkit.base.axes import Role
from growkit.base.errors import InputError, foreign, reason
from growkit.base.lazy import np
from growkit.base.limits import within_each
from growkit.base.tensors import AT_ONCE
from growkit.engine.device import CPU, device_name
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
from growkit.extras.composed_transforms import Subtensor
from growkit.extras.optimizer.layerwise_gradients import layerwise_gradients
from growkit.extras.optimizer.results.trainability_section import CopyDistance, TrainabilitySection
from growkit.extras.optimizer.stored_gradients import Named, StoredGradients
from growkit.planning.plan import Plan, Rule
from growkit.planning.transforms import Kept, Mapped, Transform
from growkit.proof.check import Check
from growkit.proof.logits import Function, Strict
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding

EQUAL = 1e-9
"""Relative difference of two float64 gradients up to which they are equal except for rounding."""

ROUNDING = 1e-13
"""Share of the model's largest float64 gradient up to which a gradient may be the rounding error of
sums that cancel."""

TINY = 1e-300
"""Prevents divisions by zero."""

MAX_RANK = 256
"""Limit for the rank of matrices whose singular values are computed."""

MAX_SIBLINGS = 4
"""Limit for the copies of a tensor that are compared, each with each other."""

MAX_NAMES = 8
"""Limit for the parameters without gradient that are listed."""

IN_CACHE = 1 << 17
"""Number of elements of a gradient that a CPU compares at a time; a device takes ``AT_ONCE``."""

OTHER_TEXT = (
    "prove it on other text (--text FILE), which may reach these parameters; or do without "
    "--trainability, if they need not train"
)
BREAK = "let copies diverge in training: make the target with --symmetry break"


def check_trainability(pair: Pair, function: Function) -> TrainabilitySection | None:
    """Compute the gradients of the target on the beginning of the first prompt.

    A device that cannot compute them, such as for lack of memory, leaves them to the CPU.

    Raises:
        InputError: they cannot be computed, but were asked for.
    """
    lineage, asked, strict = pair.lineage, pair.settings.trainability, function.strict
    if not (asked or any(plan.copies or plan.layers for plan in lineage.plans)):
        return None
    rules = lineage.plans[-1].rules if lineage.plans else ()
    fits = all(pair.after.tensors.get(rule.target) == rule.info for rule in rules)
    if not (asked or fits):
        return None
    plans = lineage.plans if fits else ()
    try:
        return _on_device(pair, strict, plans)
    except InputError as error:
        if asked:
            raise
        return _unknown(error.__cause__ or error)


def _on_device(pair: Pair, strict: Strict, plans: Sequence[Plan]) -> TrainabilitySection:
    """The section, from gradients on the device of the proof or, if it fails, on the CPU."""
    ids, side = strict.controls.call.ids, strict.side
    try:
        return _section(pair, side.models[1], ids, plans)
    except (InputError, RuntimeError) as error:
        if side.place == CPU:
            raise
        cause = reason(error)
    with strict_float64():
        _, target = side.open(torch.float64, CPU)
    section = _section(pair, target, ids, plans)
    name = device_name(side.place)
    section.notes.append(f"{name} cannot compute gradients, the CPU did: {cause}")
    return section


def _unknown(cause: BaseException) -> TrainabilitySection:
    """The section of a target whose gradients cannot be computed."""
    why = f"gradients cannot be computed layer by layer: {reason(cause)}"
    sentence = f"new capacity: unknown, as {why}"
    return TrainabilitySection(
        findings=[Finding(name="trainability", kept=None, sentence=sentence)],
        notes=[f"whether the target can train was not checked, as {why}"],
        trainable=None,
        copied=0,
        identical_gradients=0,
        without_gradient=0,
        first_identical=None,
        silent_parameters=[],
        idle_layers=0,
        symmetry=[],
    )


def _section(
    pair: Pair, target: Layerwise, ids: Tensor, plans: Sequence[Plan]
) -> TrainabilitySection:
    """The gradients of the target on a prompt, [tokens], on the device on which it is open."""
    stored = StoredGradients(pair.after)
    gradients = Gradients(plans, stored)
    failure = f"gradients cannot be computed on {device_name(target.device)}"
    with strict_float64(), foreign(failure, "choose another --device"):
        idle = layerwise_gradients(target, ids, gradients.look)
    names = [name for name, _ in target.model.named_parameters() if target.stores(name)]
    section = gradients.section(names, len(idle), asked=pair.settings.trainability)
    if stored.lost:
        section.notes.append(
            f"gradients of {len(stored.lost)} tensors were not checked, because transformers "
            f"converts them in a way that cannot be inverted (first {min(stored.lost)})"
        )
    return section


CHECK = Check(check_trainability)


class Gradients:
    """Evaluates gradients, one tensor at a time.

    Args:
        plans: all plans; only copies of the last growth are evaluated.
        as_stored: maps the name of a parameter and its gradient to names and gradients of tensors
            in the files.
    """

    def __init__(
        self, plans: Sequence[Plan], as_stored: Callable[[str, Tensor], Iterable[Named]]
    ) -> None:
        growths = [index for index, plan in enumerate(plans) if plan.copies]
        last = growths[-1] if growths else len(plans)
        self._plans, self._later = plans, plans[last + 1 :]
        self._rules = {rule.target: rule for plan in plans[last : last + 1] for rule in plan.rules}
        self._as_stored = as_stored
        self._known = self._rules or any(plan.waits for plan in plans)
        self._largest: dict[str, float] = {}
        self._copied: list[_Copied] = []
        self._zeros: dict[IndexMap, tuple[str, Tensor]] = {}
        self._waiting: set[str] = set()
        self._siblings = _Siblings(self._rules.values())

    def look(self, name: str, gradient: Tensor) -> None:
        """Evaluate the gradient of a parameter."""
        if not gradient.numel():  # for example, of an MLP of width 0
            self._waiting.add(name)
            return
        least, greatest = gradient.aminmax()
        self._largest[name] = max(float(-least), float(greatest), self._largest.get(name, 0.0))
        for stored in self._as_stored(name, gradient) if self._known else ():
            grown = self._as_grown(*stored)
            rule = self._rules.get(grown[0]) if grown else None
            if grown and rule:
                if isinstance(rule.transform, Mapped):
                    self._look_at_mapped(rule.target, rule.transform, grown[1])
                siblings = self._siblings.of(*grown)
                self._copied += [_Copied.of(grown[0], copies) for copies in siblings]
            if self._waits(stored[0]):
                self._waiting.add(name)

    def section(
        self, names: Iterable[str], idle: int, *, asked: bool = False
    ) -> TrainabilitySection:
        """Summarise the gradients.

        Args:
            names: names of all parameters.
            idle: number of layers that return their input.
            asked: whether the user asked for it; else the finding does not decide.
        """
        counts = [copied.count(self._rounding) for copied in self._copied]
        stuck = [
            copied.name for copied, count in zip(self._copied, counts, strict=True) if count[0]
        ]
        silent = sorted(name for name in names if self._silent(name))
        silent += [
            f"zeros in {name}" for name, largest in self._zeros.values() if not largest.all()
        ]
        section = TrainabilitySection(
            findings=[],
            notes=[],
            trainable=not stuck and not silent,
            copied=sum(len(copied.scale) for copied in self._copied),
            identical_gradients=sum(count[0] for count in counts),
            without_gradient=sum(count[1] for count in counts),
            first_identical=stuck[0] if stuck else None,
            silent_parameters=silent[:MAX_NAMES],
            idle_layers=idle,
            symmetry=[copied.distances(self._rounding) for copied in self._copied],
        )
        kept = section.trainable if asked else None
        sentence = f"new capacity: {sentence_of(section)}"
        finding = Finding(name="trainability", kept=kept, sentence=sentence)
        finding.verdict = "preserved, but it cannot train as asked"
        if kept is False:
            finding.advice = OTHER_TEXT if silent and not stuck else BREAK
        section.findings.append(finding)
        return section

    def _look_at_mapped(self, tensor: str, mapped: Mapped, gradient: Tensor) -> None:
        """Evaluate gradients of copies, and of zeros, which stay zero without one in any tensor."""
        if mapped.diverges:
            copied = copies_in(gradient, mapped.maps)
            self._copied += [_Copied.of(tensor, copies) for copies in copied]
        for space, zeros in zeros_in(gradient, mapped.maps):
            name, so_far = self._zeros.get(space, (tensor, zeros.new_zeros(len(zeros))))
            self._zeros[space] = name, so_far.maximum(zeros.abs().amax(1))

    @property
    def _rounding(self) -> float:
        return ROUNDING * max(self._largest.values(), default=0.0)

    def _silent(self, name: str) -> bool:
        """Whether a parameter has no gradient.

        A bias without a gradient is not silent if its matrix has one: then its gradient cancels
        because of the function itself.
        """
        if name in self._waiting:
            return False
        module, _, part = name.rpartition(".")
        reached = part == "bias" and self._largest.get(f"{module}.weight")
        return not self._largest.get(name) and not reached

    def _waits(self, name: str) -> bool:
        """Whether a stored tensor gets a gradient only after other tensors have changed."""
        for plan in reversed(self._plans):
            if name in plan.waits:
                return True
            sources = plan.by_target[name].sources if name in plan.by_target else ()
            if not sources:
                return False
            name = sources[0]
        return False

    def _as_grown(self, name: str, gradient: Tensor) -> Named | None:
        """Undo all plans after the growth; None if the tensor holds no tensor of the growth."""
        for plan in reversed(self._later):
            rule = plan.by_target.get(name)
            if rule is None or not rule.transform.holds:
                return None
            (name,) = rule.sources
            back = rule.transform.undo(gradient.__getitem__, slice(0, len(gradient)))
            if back is None:
                return None
            gradient = back
        return name, gradient


def sentence_of(section: TrainabilitySection) -> str:
    """State whether copies can diverge in training."""
    copied, stuck, silent = section.copied, section.identical_gradients, section.without_gradient
    if stuck:
        return (
            f"{stuck:,} of {copied:,} copied rows get identical "
            f"gradients (first in {section.first_identical}) and would stay equal in training; "
            "--symmetry break lets them part"
        )
    if section.silent_parameters:
        return f"no gradient at all for {', '.join(section.silent_parameters)}"
    sentence = "every parameter gets a gradient"
    if copied:
        sentence = f"all copies get distinct gradients, for {copied:,} copied rows"
        sentence += f" ({silent:,} get none on this text)" if silent else ""
    if idle := section.idle_layers:
        start = "new layer starts" if idle == 1 else f"{idle:,} new layers start"
        sentence += (
            f"; the {start} as identity: the matrices that write the output learn from the first "
            "step, the rest from the second"
        )
    return sentence


class _Siblings:
    """Groups of tensors that are copies of one tensor, such as experts."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._of = {rule.target: _copied_part(rule.transform) for rule in rules}
        self._left = Counter(part for part in self._of.values() if part)
        self._alone = {part for part, count in self._left.items() if count == 1}
        self._found: dict[object, list[Tensor]] = {}

    def of(self, name: str, gradient: Tensor) -> Iterator[list[Tensor]]:
        """Yield the gradients of some tensors of a group, when the last of them has arrived.

        Tensors without a gradient are left out: they belong to experts that received no token.
        """
        part = self._of[name]
        if part is None or part in self._alone:
            return
        self._left[part] -= 1
        gradients = self._found.setdefault(part, [])
        if len(gradients) < MAX_SIBLINGS and bool(gradient.any()):
            gradients.append(gradient.reshape(len(gradient), -1))
        if not self._left[part]:
            del self._found[part]
            if len(gradients) > 1:
                yield gradients


def _copied_part(transform: Transform) -> object:
    """The original of a tensor that is a copy, as a key; None if it is not a copy."""
    if isinstance(transform, Subtensor):
        original = _copied_part(transform.whole)
        return original and (original, transform.begin)
    return (transform.source, transform.factor) if isinstance(transform, Kept) else None


@dataclass(frozen=True)
class _Copied:
    """Gradients of copies in a tensor.

    Attributes:
        name: name of the tensor.
        copies: number of copies of every row.
        scale: largest absolute gradient of every row, [rows].
        distance: distance between the two closest copies of every row, relative to its scale,
            [rows].
        gain: see ``CopyDistance.effective_rank_gain``.
    """

    name: str
    copies: int
    scale: Tensor
    distance: Tensor
    gain: float | None

    @classmethod
    def of(cls, name: str, copies: list[Tensor]) -> _Copied:
        """Evaluate copies, each [rows, columns], which are views of the whole gradient."""
        together = IN_CACHE if copies[0].device.type == "cpu" else AT_ONCE
        at_once = max(1, together // copies[0].shape[1])
        parts = zip(*(copy.split(at_once) for copy in copies), strict=True)
        scales, distances = zip(*(_distances(part) for part in parts), strict=True)
        return cls(name, len(copies), torch.cat(scales), torch.cat(distances), _rank_gain(copies))

    def count(self, rounding: float) -> tuple[int, int]:
        """Count rows with copies that have equal gradients, and rows without a gradient."""
        active = self.scale > rounding
        return int((within_each(self.distance, EQUAL) & active).sum()), int((~active).sum())

    def distances(self, rounding: float) -> CopyDistance:
        """The median distance of the rows that have a finite gradient; 0 if there are none."""
        active = (self.scale > rounding) & self.scale.isfinite()
        distance = self.distance[active] if bool(active.any()) else torch.zeros(1)
        return CopyDistance(
            tensor=self.name,
            copies=self.copies,
            relative_distance=float(distance.median()),
            effective_rank_gain=self.gain,
        )


def _distances(copies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The scale of every row's gradient, and the relative distance of its two closest copies."""
    scale = torch.stack([copy.abs().amax(1) for copy in copies]).amax(0)
    distance = torch.full_like(scale, torch.inf)
    for first, second in combinations(copies, 2):
        distance = distance.minimum((first - second).abs_().amax(1))
    return scale, torch.where(scale > 0, distance / scale.clamp_min(TINY), 0.0)


def _rank_gain(copies: list[Tensor]) -> float | None:
    """Effective rank of the gradient, minus that of equal copies.

    None for large matrices, and for gradients that overflow.

    Roy and Vetterli, "The effective rank", EUSIPCO 2007: exp of the entropy of singular values.
    """
    large = min(sum(len(copy) for copy in copies), copies[0].shape[1]) > MAX_RANK
    if large or not all(bool(copy.isfinite().all()) for copy in copies):
        return None

    def effective_rank(matrix: Tensor) -> float:
        values = torch.linalg.svdvals(matrix)
        return float(torch.exp(torch.special.entr(values / values.sum().clamp_min(TINY)).sum()))

    return effective_rank(torch.cat(copies)) - effective_rank(torch.stack(copies).mean(0))


def copies_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[list[Tensor]]:
    """Yield the copies in a tensor of the target's shape, such as a weight or its gradient.

    Only written dimensions have copies; read dimensions have parts.

    Args:
        tensor: a tensor of the target's shape.
        maps: the index map of every dimension.

    Yields:
        For every number of copies, one tensor per copy, all of shape [source coordinates with that
        number of copies, product of the other dimensions].
    """
    for position, mapped in enumerate(maps):
        if mapped.role is Role.WRITTEN:
            rows = tensor.movedim(position, 0)
            for group in mapped.groups:
                if len(group.targets) > 1:
                    yield [take(rows, 0, copy).reshape(len(copy), -1) for copy in group.targets]


def zeros_in(tensor: Tensor, maps: Sequence[IndexMap]) -> Iterator[tuple[IndexMap, Tensor]]:
    """Yield the values at written coordinates that copy nothing and therefore start as zeros.

    Zeros in read dimensions are left out, since their inputs are always zero.

    Args:
        tensor: see ``copies_in``.
        maps: the index map of every dimension.

    Yields:
        The map of every dimension with such coordinates, and the values as [coordinates, product
        of the other dimensions].
    """
    for position, mapped in enumerate(maps):
        places = np.flatnonzero(mapped.source == NOTHING)
        if mapped.role is Role.WRITTEN and len(places):
            yield mapped, take(tensor.movedim(position, 0), 0, places).reshape(len(places), -1)
