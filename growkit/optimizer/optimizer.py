"""An optimizer that is taken along: opened with the source, written into the folder of the target.

Its state is read and refused before anything is written, and streamed after the weights.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

from growkit.base.errors import InputError
from growkit.base.progress import Progress
from growkit.base.registry import members
from growkit.base.tensors import FLOAT_BYTES, total_bytes, total_parameters
from growkit.checkpoint.reading import Checkpoint, outlined
from growkit.checkpoint.writing import Hashes, write_shards
from growkit.optimizer.groups import Factors, class_updates
from growkit.optimizer.growing import GrownState
from growkit.optimizer.parameters import Parameters, check_trainable, parameters_of
from growkit.optimizer.schedule import grown_schedule, holds_schedule
from growkit.optimizer.state import MUON, Format, State, check_state
from growkit.planning.plan import Lineage
from growkit.planning.updates import Law, law_of
from growkit.results.operation import OptimizerResult


def formats() -> list[Format]:
    """All formats, found by being there."""
    return cast("list[Format]", list(members("growkit.optimizer.formats", "FORMAT").values()))


def outputs() -> list[str]:
    """Patterns of everything that an optimizer's state is in the folder of a model."""
    return [pattern for each in formats() for pattern in each.outputs]


def open_state(path: Path, parameters: Parameters) -> State:
    """Read everything of an optimizer's state but its numbers.

    Raises:
        InputError: it is of no known format, damaged, or of another model or optimizer.
    """
    if not path.exists():
        raise InputError(
            f"{path}, which should hold an optimizer's state, does not exist; check its name"
        )
    for each in formats():
        if each.holds(path):
            state = each.open(path, parameters)
            check_state(state, parameters)
            return state
    known = ", ".join(each.name for each in formats())
    raise InputError(f"{path} holds no optimizer's state that growkit reads; give {known}")


def written_in(folder: Path) -> Path | None:
    """Where the folder of a model has its optimizer's state, as growkit writes it; None if not."""
    for each in formats():
        for place in (folder, folder / each.outputs[0]):
            if place.exists() and each.holds(place):
                return place
    return None


class Optimizer:
    """The optimizer of a source, and what becomes of it.

    Args:
        path: of its state.
        source: the checkpoint that it trained.
        lineage: from the source to the target.

    Attributes:
        state: as it was read.
        bytes: about how much will be written.

    Raises:
        InputError: see ``open_state``; or transformers has no class for the source.
    """

    def __init__(self, path: Path, source: Checkpoint, lineage: Lineage) -> None:
        self._lineage = lineage
        check_trainable(lineage.target.config, f"the grown {source.folder}")
        self._before = parameters_of(source)
        self.state = open_state(path, self._before)
        tensors = self.state.numbers.tensors
        kinds = {name.rpartition(".")[2]: info.dtype for name, info in tensors.items()}
        elements = total_parameters(lineage.target.tensors)
        self.bytes = sum(elements * FLOAT_BYTES[dtype] for dtype in kinds.values())

    def grown(self, target: Checkpoint, law: Law) -> GrownState:
        """The state of the target's optimizer.

        Args:
            target: what the lineage makes; of its files, headers are enough.
            law: how it is to be updated.

        Raises:
            InputError: transformers has no class for it.
        """
        after, groups, muon = parameters_of(target), self.state.groups, None
        if MUON in self.state.kinds.values():
            muon = str(groups[0].options.get("adjust_lr_fn") or "original")
        # This option is false in Adam, whose decay is a part of the gradient.
        coupled = any(each.options.get("decoupled_weight_decay") is False for each in groups)
        updates = class_updates(target, law.updates, by_element=False)
        factors = {
            name: Factors.of(each, after.shapes.get(name, ()), muon, coupled=coupled)
            for name, each in updates.items()
        }
        return GrownState(self.state, self._lineage, self._before, after, factors)

    def check_schedules(self) -> None:
        """Try whether schedules that are saved with the state can be carried over.

        Raises:
            InputError: one holds rates that cannot be scaled, or is of other groups.
        """
        state, target = self.state, self._lineage.target
        if not holds_schedule(state.schedules):
            return
        with outlined(target, target.config) as outline:
            grown = self.grown(outline, law_of(self._lineage))
        for where, each in state.schedules.items():
            grown_schedule(each, where, len(state.groups), grown.groups)

    def write(self, folder: Path, law: Law, progress: Progress, hashes: Hashes) -> OptimizerResult:
        """Write the grown state into a folder that holds the target already.

        Args:
            folder: of the target.
            law: how the target is to be updated.
            progress: where progress is shown.
            hashes: of the files, which are computed while they are written.

        Raises:
            InputError: the state cannot be read, or transformers has no class for the target.
        """
        grown = self.grown(Checkpoint(folder), law)
        with progress.bytes("optimizer", total_bytes(grown.tensors)) as advance:
            save = partial(write_shards, advance=advance, hashes=hashes)
            self.state.write(grown, folder, save)
        return self.result(grown)

    def result(self, grown: GrownState | None = None) -> OptimizerResult:
        """What is known of it: before anything is written, or of what was written."""
        state = self.state
        steps = [step for step in state.steps.values() if step]
        return OptimizerResult(
            path=str(state.where),
            format=state.format.name,
            moments=sorted({kind for kinds in state.kinds.values() for kind in kinds}),
            step=int(max(steps)) if steps else None,
            groups=len(grown.groups) if grown else len(state.groups),
            bytes=total_bytes(grown.tensors) if grown else self.bytes,
            reset=dict(grown.reset) if grown else {},
            beside=dict(state.beside),
            assumed=state.assumed,
        )
