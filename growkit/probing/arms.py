"""Those that are trained: the source, and what the candidates make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from growkit.base.errors import InputError, PlaceError
from growkit.base.progress import Advance, Progress
from growkit.checkpoint.made import is_untouched
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import total_parameters
from growkit.engine.oracle import lacks_class, load, quiet
from growkit.families.added import temporary_family
from growkit.pipeline.running import run
from growkit.probing.candidates import Candidate
from growkit.probing.settings import ProbeSettings
from growkit.probing.text import Data
from growkit.probing.training import Look, Trainee, no_failure, train
from growkit.probing.work import Work


def flops_of(stored: Any, window: Tensor, device: torch.device) -> int:
    """Floating-point operations of training on a window, [tokens].

    Args:
        stored: a model folder, or the checkpoint in one.
        window: the tokens.
        device: where it is tried.
    """
    model: Any = load(stored, torch.float32, device, None)  # as it is trained
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # products of groups are not counted
    ids = window[None].to(device)
    # Fused attention is not counted on every device, and its kernels by other rules.
    math = sdpa_kernel(SDPBackend.MATH)
    with quiet(), math, FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return int(counter.get_total_flops())


SOURCE = "source"
"""What notes call the source; those of candidates begin with a number."""

NOTED = ("outcome", "reason", "promise", "parameters", "step_flops")
"""What is noted of one that was grown."""

LOOKS, EARLY = 8, 4
"""Looks at the loss on the way: over a whole training, and up to equal compute."""


@dataclass
class Arm:
    """The source, or a candidate, and what became of it.

    Attributes:
        name: what it is called.
        candidate: None for the source.
        stored: where its model lies; None if there is none that could be trained.
        outcome: ``grown``, ``broken`` or ``refused``.
        reason: why, of the last two.
        promise: of its recipe.
        parameters: of its model.
        step_flops: floating-point operations of a step.
        runs: its trainings, by rate and seed.
    """

    name: str
    candidate: Candidate | None
    stored: Path | Checkpoint | None = None
    outcome: str = "grown"
    reason: str | None = None
    promise: str | None = None
    parameters: int | None = None
    step_flops: int | None = None
    runs: dict[tuple[float, int], list[Look]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What notes call it."""
        return self.candidate.folder if self.candidate else SOURCE

    @property
    def family(self) -> Mapping[str, Any] | None:
        """What describes its family, where growkit does not know that."""
        return self.candidate.recipe.family if self.candidate else None

    def refuse(self, reason: str) -> None:
        """It cannot be grown or trained."""
        self.outcome, self.reason, self.stored, self.step_flops = "refused", reason, None, None
        self.runs = {}


def the_source(
    name: str, model: Checkpoint, data: Data, settings: ProbeSettings, device: torch.device
) -> Arm:
    """The source, as it is.

    Raises:
        InputError: it cannot be trained.
    """
    arm = Arm(name, None, model, parameters=total_parameters(model.tensors))
    arm.step_flops = _step_flops(name, model, data, settings, device)
    return arm


def grown(
    candidate: Candidate,
    work: Work,
    data: Data,
    settings: ProbeSettings,
    device: torch.device,
    progress: Progress,
) -> Arm:
    """A candidate, grown and proved unless that was done before.

    Raises:
        InputError: what was grown before is not what it was, or nothing can be written any more.
    """
    arm, folder = Arm(candidate.name, candidate), work.folder / candidate.folder
    noted = work.grown(arm.key)
    if noted and noted["outcome"] == "grown" and not is_untouched(folder):
        raise InputError(
            f"{folder} has been changed since it was grown; choose another --work, and begin again"
        )
    if noted is None:
        with temporary_family(arm.family):
            _grow(arm, candidate, folder, data, settings, device, progress)
        noted = work.note_grown(arm.key, {name: getattr(arm, name) for name in NOTED})
    arm = replace(arm, **{name: noted[name] for name in NOTED})
    arm.stored = folder if arm.outcome == "grown" else None
    return arm


def _grow(
    arm: Arm,
    candidate: Candidate,
    folder: Path,
    data: Data,
    settings: ProbeSettings,
    device: torch.device,
    progress: Progress,
) -> None:
    recipe = replace(candidate.recipe, output=str(folder))
    try:
        result = run(recipe, overwrite=True, progress=progress)
        arm.promise, arm.parameters = result.promise, result.parameters
        if result.kept is False:
            assert result.verification
            arm.outcome, arm.reason = "broken", result.verification.reason
            return
        if lacks_class(Checkpoint(folder).config):
            raise InputError(
                "transformers has no class for its layout, so it cannot be trained as it is; end "
                "the recipe with 'convert: diff-transformer'"
            )
        arm.step_flops = _step_flops(arm.name, folder, data, settings, device)
    except PlaceError:
        raise  # with more room, it can be grown after all
    except InputError as error:
        arm.refuse(str(error))


def _step_flops(
    name: str, stored: Path | Checkpoint, data: Data, settings: ProbeSettings, device: torch.device
) -> int:
    with no_failure(name, device):
        return settings.batch * flops_of(stored, data.training[0], device)


def train_all(
    arms: list[Arm],
    work: Work,
    data: Data,
    settings: ProbeSettings,
    device: torch.device,
    advance: Advance,
) -> None:
    """Train everything that can be, with every rate and seed, unless that was done before.

    Args:
        arms: of which some may be refused in the end.
        work: where it is noted.
        data: what they learn from, and are asked.
        settings: how they are trained.
        device: where.
        advance: called with the floating-point operations that are over.

    Raises:
        InputError: the source cannot be trained.
    """
    equal = settings.steps * min(arm.step_flops for arm in arms if arm.step_flops)
    for arm in arms:
        assert arm.step_flops
        looks = looks_of(settings.steps, equal / arm.step_flops)
        try:
            with temporary_family(arm.family):
                _train(arm, work, data, settings, device, looks, advance)
        except InputError as error:
            if arm.candidate is None:
                raise
            arm.refuse(str(error))


def _train(
    arm: Arm,
    work: Work,
    data: Data,
    settings: ProbeSettings,
    device: torch.device,
    looks: set[int],
    advance: Advance,
) -> None:
    cost = arm.step_flops or 0
    trainee = trainee_of(arm, work)
    for lr in settings.lr:
        for seed in range(settings.seeds):
            found = work.trained(arm.key, lr, seed, settings.steps, len(data.held_out))
            if found is None:
                found = train(
                    trainee, data, settings, lr, seed, looks, device, lambda n: advance(n * cost)
                )
                work.note_trained(arm.key, lr, seed, found)
                advance((settings.steps - found[-1].step) * cost)
            else:
                advance(settings.steps * cost)
            arm.runs[lr, seed] = found


def trainee_of(arm: Arm, work: Work) -> Trainee:
    """The model of an arm, with the folder that has its law."""
    assert arm.stored is not None
    law = None if arm.candidate is None else work.folder / arm.candidate.folder
    return Trainee(arm.name, arm.stored, law)


def looks_of(steps: int, equal: float) -> set[int]:
    """After which steps the loss is measured.

    Args:
        steps: of the whole training.
        equal: the step of equal compute, probably.
    """
    whole = {round(number * steps / LOOKS) for number in range(LOOKS + 1)}
    early = {round(number * equal / EARLY) for number in range(EARLY)}
    return whole | early | {int(equal), min(int(equal) + 1, steps)}
