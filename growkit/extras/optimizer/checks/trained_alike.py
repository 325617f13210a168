"""Does the target learn what its source would have learned?

Both models take the same AdamW steps on the same batches, in strict float64: the source with plain
settings, the target with the factors of its plan. They begin with the states of their optimizers if
the target was grown with one, otherwise with the source's moments after a first batch, which are
grown for the target. The limit is the effect of rounding on the source's own training: the source
is trained once more, with noise on its weights before every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkit.algebra.update_law import Update
from growkit.base.errors import InputError
from growkit.base.limits import rounded_sum, training_limit, within
from growkit.base.settings import Settings
from growkit.base.tensors import Weights, parts, total_parameters
from growkit.base.units import size
from growkit.engine.device import choose_device, memory_of
from growkit.engine.metrics import finite
from growkit.engine.prompts import make_prompts
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import class_loss, load_model
from growkit.extras.optimizer.grow_state import MOMENTS, GrownState, Optimizer, grown_moments
from growkit.extras.optimizer.param_groups import Parameters, ParamGroup, class_updates
from growkit.extras.optimizer.results.training_section import TrainingSection
from growkit.extras.optimizer.state import ADAMW, MUON, STEP, State, open_state, written_in
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.model import Model
from growkit.planning.plan import Lineage
from growkit.planning.recipe import Recipe
from growkit.planning.transforms import AT_RANDOM
from growkit.planning.updates import Law, law_of
from growkit.proof.check import Check
from growkit.proof.fingerprint import widest
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import AGAIN, Finding, counted

RATE, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
"""Settings of AdamW. All parameters decay, so that every factor has an effect."""

EPS = 1e-6
"""Eps of AdamW, so large that gradients of mere rounding have no effect."""

WINDOWS, LENGTH = 2, 64
"""Windows per batch, and default number of tokens per window."""

FAULT = 2.0
"""Factor of a learning rate in the negative control."""

BYTES_PER_PARAMETER = 32
"""Memory of a training: a weight, its gradient and two moments in float64."""

Updates = Mapping[str, Update]


@dataclass(frozen=True)
class Beginning:
    """The initial state of the optimizer.

    Attributes:
        moments: moments of every parameter.
        steps: number of steps of every parameter.
        options: AdamW's options of every parameter that differ from the defaults here.
    """

    moments: Mapping[str, Mapping[str, Tensor]]
    steps: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class StrictTraining:
    """A model in training with AdamW.

    Apart from its eps, Adam does not depend on the scale of gradients. If the law multiplies eps by
    a factor that varies within a parameter, gradients are divided by the factor instead.

    Args:
        model: the model, in float64.
        updates: factors for the settings of each parameter, by name; new parameters do not train.
            None for plain settings.
        beginning: the initial state of the optimizer; None for an empty state.
    """

    def __init__(
        self, model: Any, updates: Updates | None = None, beginning: Beginning | None = None
    ) -> None:
        self._model = model
        self._trained: dict[str, tuple[nn.Parameter, Tensor]] = {}
        groups = []
        for name, parameter in model.named_parameters():
            update = Update() if updates is None else updates[name]
            if not parameter.is_floating_point() or update.new:
                continue
            self._trained[name] = parameter, torch.from_numpy(update.gradient).to(parameter.device)
            settings = {"lr": RATE * update.rate, "weight_decay": DECAY * update.decay}
            own = beginning.options.get(name, {}) if beginning else {}
            groups.append({"params": [parameter], **settings, **own})
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
        if beginning is None:
            return
        for name, (parameter, factor) in self._trained.items():
            state = self._optimizer.state[parameter]
            state["step"] = torch.tensor(float(beginning.steps[name]), dtype=torch.float32)
            for key, moment in beginning.moments[name].items():
                state[key] = moment.to(parameter) / (
                    factor if key == "exp_avg" else factor.square()
                )

    def step(self, windows: Sequence[Tensor]) -> float:
        """Take a step on windows of tokens, each [tokens]; return their mean loss before it."""
        total = 0.0
        with strict_float64():
            for loss in self._losses(windows):
                loss.backward()
                total += float(loss.detach())
        for parameter, factor in self._trained.values():
            if parameter.grad is not None:
                parameter.grad /= factor
        self._optimizer.step()
        self._model.zero_grad()
        return total

    def gather(self, windows: Sequence[Tensor]) -> dict[str, dict[str, Tensor]]:
        """Take the first step, without a law of updates, and return the moments after it."""
        self.step(windows)
        return {
            name: {key: self._optimizer.state[parameter][key].clone() for key in MOMENTS}
            for name, (parameter, _) in self._trained.items()
        }

    def evaluate(self, windows: Sequence[Tensor]) -> tuple[float, Tensor]:
        """Compute the mean loss of some windows, and the logits of the first."""
        with strict_float64(), torch.no_grad():
            return sum(map(float, self._losses(windows))), self._computed(windows[0])[1].cpu()

    def _losses(self, windows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the part of each window in the mean loss of all predictions, in nats."""
        predictions = sum(len(ids) - 1 for ids in windows)
        for ids in windows:
            yield self._computed(ids)[0] * ((len(ids) - 1) / predictions)

    def _computed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a window as the class returns it, and the logits."""
        return class_loss(self._model, ids.to(next(self._model.parameters()).device))

    def disturb(self, amount: float, seed: int) -> None:
        """Change every weight at random by at most ``amount`` times its value."""
        generator = torch.Generator().manual_seed(seed)
        for parameter, _ in self._trained.values():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.mul_(1 + amount * (2 * noise - 1).to(parameter.device))


@dataclass(frozen=True)
class _Run:
    """The results of a training.

    Attributes:
        losses: losses on every batch before its step, and on one more batch after the last step.
        logits: logits of the first window of that last batch.
    """

    losses: list[float]
    logits: Tensor

    def first_step_apart(self, other: _Run) -> float:
        """Difference of the losses after the first step, relative to the loss before it."""
        return abs(other.losses[1] - self.losses[1]) / max(abs(self.losses[0]), 1e-300)

    def distance_to(self, other: _Run) -> float:
        """Distance from another run of the same length; see ``TrainingSection.relative``."""
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        scale = self.logits.square().mean().sqrt()
        known = other.logits[..., : self.logits.shape[-1]]  # new tokens come last
        logits = float((self.logits - known).abs().max() / scale)
        distance = max(max(losses) / max(abs(self.losses[0]), 1e-300), logits)
        return distance if math.isfinite(distance) else math.inf


def _batches(settings: Settings, source: Checkpoint) -> list[list[Tensor]]:
    """Make batches for the first moments, for every step and for the last loss.

    Windows of a short text are repeated.
    """
    assert settings.steps is not None
    count = settings.steps + 2
    asked = replace(settings, prompts=WINDOWS * count, length=settings.length or LENGTH)
    windows = cycle(make_prompts(asked, source.folder, source.config).windows)
    return [list(islice(windows, WINDOWS)) for _ in range(count)]


def refuse_training(pair: Pair) -> None:
    """Refuse a training that is not possible.

    Raises:
        InputError: it is not known how the target was made, there is no room, or a state is
            missing.
    """
    if pair.settings.steps is None:
        return
    if pair.lineage.unknown:
        raise InputError(
            f"to train {pair.after.folder} alongside its source, its origin must be known, but "
            f"{pair.lineage.unknown}; leave out --steps"
        )
    refuse_without_room(pair.settings, pair.after)
    state_paths(pair.before, pair.after, pair.recipe, pair.optimizer)


def refuse_without_room(settings: Settings, target: Model) -> None:
    """Refuse a training that does not fit into memory.

    Raises:
        InputError: it does not fit; the message has the memory that it needs.
    """
    if settings.steps is None:
        return
    needed = BYTES_PER_PARAMETER * total_parameters(target.tensors)
    memory = memory_of(choose_device(settings.device))
    if needed > memory:
        raise InputError(
            f"training in float64 would take {size(needed)} of {size(memory)} of memory; "
            "leave out --steps, or prove a smaller model that was grown in the same way"
        )


def check_training(pair: Pair, function: Function) -> TrainingSection | None:
    """Train source and target side by side, if the settings ask for it."""
    if pair.settings.steps is None:
        return None
    places = state_paths(pair.before, pair.after, pair.recipe, pair.optimizer)
    device = function.strict.side.place
    return prove_training(pair.before, pair.after, pair.lineage, pair.settings, device, places)


CHECK = Check(
    check_training,
    refuse_training,
    if_kept=True,
    section="training",
    preflight=refuse_without_room,
)


def prove_training(
    before: Checkpoint,
    after: Checkpoint,
    lineage: Lineage,
    settings: Settings,
    device: torch.device,
    places: StatePaths,
) -> TrainingSection:
    """Train source and target side by side.

    Args:
        before: the source.
        after: the target, with the tensors that the lineage makes.
        lineage: how the target was made.
        settings: settings of the proof, with a number of steps.
        device: device of both trainings.
        places: the paths of the optimizers' states.

    Raises:
        InputError: there is no text to train on, or a state cannot be read.
    """
    batches, law = _batches(settings, before), law_of(lineage)
    updates = class_updates(after, law.updates)
    rounding = rounded_sum(widest(before))
    begun, where, both, unlike = "the moments of a first batch", "", None, None
    if places.source:
        one, other, unlike = compare_states(places, before, after, lineage, law)
        where = f"{one.where} and {other.where}"
        if all(one.kinds.get(name, MUON) >= ADAMW for name in Parameters.of(before).shapes):
            begun, both = f"the optimizers' states in {where}", (_beginning(one), _beginning(other))
    both = both or first_moments(before, after, lineage, batches[0], device)
    source = _trained(before, both[0], batches, device)
    target = _trained(after, both[1], batches, device, updates)
    disturbed = _trained(before, both[0], batches, device, disturbed=rounding)
    relative, own = source.distance_to(target), max(source.distance_to(disturbed), rounding)
    tolerance = None if law.why else training_limit(own)
    fault, faulty = _with_fault(updates)
    caught = None
    if tolerance is not None:
        first = _trained(after, both[1], batches[:3], device, faulty)
        caught = not within(source.first_step_apart(first), tolerance)
    still = sum(update.new for update in updates.values())
    judged = _judge(law, source, target, tolerance, still, caught)
    kept, sentence = _with_state(*judged, unlike, where)
    finding = _finding(kept, f"{sentence}{places.untried}", relative, tolerance, caught)
    return TrainingSection(
        findings=[finding],
        notes=[],
        steps=len(batches) - 2,
        why=list(law.why),
        begun=begun,
        losses_source=[finite(loss) for loss in source.losses],
        losses_target=[finite(loss) for loss in target.losses],
        relative=finite(relative),
        tolerance=tolerance and finite(tolerance),
        own=finite(own),
        standing_still=still,
        control=fault,
        control_caught=caught,
        learning_rate=RATE,
        weight_decay=DECAY,
        eps=EPS,
    )


def _with_state(
    kept: bool | None, sentence: str, unlike: str | None, where: str
) -> tuple[bool | None, str]:
    """Add the judgement of the optimizer's state to that of training.

    Args:
        kept: whether both models learn the same; None if that is not promised.
        sentence: the judgement of training.
        unlike: the first difference of the states; empty if they agree, None without states.
        where: paths of the states.
    """
    if unlike:
        return False, f"the optimizer's state is not the source's, grown: {unlike}"
    if unlike is None:
        return kept, sentence
    return kept, f"{sentence}, and its optimizer's state is the source's, grown ({where})"


def _finding(
    kept: bool | None, sentence: str, relative: float, tolerance: float | None, caught: bool | None
) -> Finding:
    return Finding(
        name="training",
        kept=kept,
        sentence=sentence,
        measured=finite(relative),
        limit=tolerance and finite(tolerance),
        advice=_advice(relative, tolerance, caught=caught) if kept is False else None,
        verdict="preserved, but it does not learn as its source does",
        in_reason=True,
    )


def _advice(relative: float, tolerance: float | None, *, caught: bool | None) -> str:
    """What to do if the target did not learn the same."""
    if caught is False:
        return "train both for longer (--steps), so that a deliberate fault shows"
    if tolerance is not None and within(relative, tolerance):
        return "grow the target again together with the state of the source's optimizer"
    return AGAIN


def _loaded(stored: Checkpoint, device: torch.device, *treated: Any) -> StrictTraining:
    with strict_float64():
        return StrictTraining(load_model(stored, torch.float64, device, None), *treated)


def first_moments(
    before: Checkpoint,
    after: Checkpoint,
    lineage: Lineage,
    windows: Sequence[Tensor],
    device: torch.device,
) -> tuple[Beginning, Beginning]:
    """The source's state after one step on some windows, and that state grown for the target."""
    moments = _loaded(before, device).gather(windows)
    grown = grown_moments(moments, before, after, lineage.plans)
    one, other = (Beginning(by_name, dict.fromkeys(by_name, 1.0)) for by_name in (moments, grown))
    return one, other


def _trained(
    stored: Checkpoint,
    beginning: Beginning,
    batches: Sequence[Sequence[Tensor]],
    device: torch.device,
    updates: Updates | None = None,
    disturbed: float = 0.0,
) -> _Run:
    """Train a model on all batches but the first and the last, and evaluate it on the last."""
    training = _loaded(stored, device, updates, beginning)
    losses = []
    for step, windows in enumerate(batches[1:-1], 1):
        if disturbed:
            training.disturb(disturbed, step)
        losses.append(training.step(windows))
    loss, logits = training.evaluate(batches[-1])
    return _Run([*losses, loss], logits)


def _with_fault(updates: Updates) -> tuple[str, Updates]:
    """Insert a fault into the factors of one parameter; return its description and all factors."""
    trained = [name for name, update in updates.items() if not update.new]
    matrices = [name for name in trained if "norm" not in name] or trained
    name = max(matrices, key=lambda matrix: updates[matrix].n_in)
    return f"learning rate of {name} × {FAULT:g}", {**updates, name: updates[name].times(FAULT)}


def _path(law: Law) -> str:
    """Explain why the target does not train like its source, with the remedy if there is one."""
    only = all(why.endswith(AT_RANDOM) for why in law.why)
    keeps = ", while --symmetry keep preserves the source's training" if only else ""
    return f"the target is trained differently ({'; '.join(law.why)}){keeps}"


def _judge(
    law: Law, source: _Run, target: _Run, tolerance: float | None, still: int, caught: bool | None
) -> tuple[bool | None, str]:
    """Whether both learned the same (None if this is not promised), with a sentence on it."""
    relative, steps = source.distance_to(target), len(source.losses) - 1
    times = counted(steps, "step")
    besides = f", while {still} new parameters were not trained" if still else ""
    if tolerance is None:
        gaps = [abs(a - b) for a, b in zip(source.losses, target.losses, strict=True)]
        return None, (
            f"both were also trained for {times}: {_path(law)}; the losses are {gaps[0]:.1e} nats "
            f"per token apart before the first step and {gaps[-1]:.1e} after the last{besides}"
        )
    if not within(relative, tolerance):
        return False, (
            f"the target does not learn what its source does: after {times} losses or logits "
            f"differ by {relative:.1e} of their scale, and rounding allows {tolerance:.1e}{besides}"
        )
    if not caught:
        return False, "a deliberate fault in the factors was not noticed, so nothing is proved"
    close = f"losses and logits differ by at most {relative:.1e} of their scale{besides}"
    return True, f"the target learns what its source does: after {times} {close}"


@dataclass(frozen=True)
class StatePaths:
    """Paths of two optimizers' states.

    Attributes:
        source: the source's state; None if its path is not known.
        target: the target's state; None if there is none.
    """

    source: Path | None
    target: Path | None

    @property
    def untried(self) -> str:
        """The end of a sentence on a target's state that is not tried; empty if there is none."""
        if self.target is None or self.source:
            return ""
        why = "since the source's state is not in its folder: name it with --optimizer"
        return f"; the optimizer's state in {self.target} was not tried, {why}"


def state_paths(
    before: Checkpoint, after: Checkpoint, recipe: Recipe | None, path: Path | None
) -> StatePaths:
    """Find the states of two optimizers.

    Args:
        before: the source.
        after: the target.
        recipe: the recipe in the target's manifest, which is not trusted: a state is looked up only
            in the source's folder.
        path: the path of the source's state, from the user; None if the user gave none.

    Raises:
        InputError: a path is given, but the target has no state.
    """
    target = written_in(after.folder)
    if path is not None and target is None:
        raise InputError(
            f"{after.folder} holds no optimizer's state that could be compared with {path}; "
            "leave --optimizer out, or grow the model with it"
        )
    if path is not None:
        return StatePaths(path, target)
    if target is None or recipe is None or recipe.optimizer is None:
        return StatePaths(None, None)
    inside = before.folder / Path(recipe.optimizer).name
    return StatePaths(inside if inside.exists() else written_in(before.folder), target)


def compare_states(
    places: StatePaths, before: Checkpoint, after: Checkpoint, lineage: Lineage, law: Law
) -> tuple[State, State, str]:
    """Read the states of both optimizers, and compare the target's with the grown source's.

    Args:
        places: the paths of both states.
        before: the source.
        after: the target.
        lineage: how the target was made.
        law: the law of updates of the target.

    Returns:
        Both states, and the first difference; empty if there is none.

    Raises:
        InputError: a state cannot be read, or belongs to another model.
    """
    assert places.source
    assert places.target
    optimizer = Optimizer(places.source, before, lineage)
    target = open_state(places.target, Parameters.of(after))
    return optimizer.state, target, next(_differences(optimizer.grown(after, law), target), "")


def _differences(grown: GrownState, target: State) -> Iterator[str]:
    expected, stored, where = _settings(grown.groups), _settings(target.groups), target.where
    for name in sorted(stored.keys() ^ expected.keys()):
        yield f"{name} is in {'no' if name in expected else 'a'} group of {where}"
    for name, options in expected.items():
        for key, value in options.items():
            if (actual := stored[name].get(key)) != value:
                yield f"{key} of {name} in {where} is {actual}; {value} was expected"
    for name, step in target.steps.items():
        if step != (wanted := grown.steps.get(name, step)):
            yield f"the step of {name} in {where} is {step:g}; {wanted:g} was expected"
    for name, info in grown.tensors.items():
        parameter, _, kind = name.rpartition(".")
        if kind != STEP and not _same(grown, target.numbers, name):
            yield f"{kind} of {parameter} in {where} ({list(info.shape)}) does not grow from it"


def _same(grown: GrownState, numbers: Weights, name: str) -> bool:
    if numbers.tensors.get(name) != grown.tensors[name]:
        return False
    pairs = ((grown.read(name, rows), numbers.read(name, rows)) for rows in parts(grown, name))
    return all(one.equal(other) for one, other in pairs)


def _settings(groups: Sequence[ParamGroup]) -> dict[str, dict[str, Any]]:
    """The options of every parameter."""
    return {name: dict(group.options) for group in groups for name in group.parameters}


def _beginning(state: State) -> Beginning:
    """Read a state into memory."""
    moments: dict[str, dict[str, Any]] = {}
    for key in state.numbers.tensors:
        name, _, kind = key.rpartition(".")
        moments.setdefault(name, {})[kind] = state.numbers.read(key, None).double()
    options: dict[str, dict[str, Any]] = {}
    for name, group in _settings(state.groups).items():
        betas = tuple(map(float, group["betas"]))
        options[name] = {"betas": betas, "amsgrad": "max_exp_avg_sq" in moments[name]}
    return Beginning(moments, dict(state.steps), options)
