"""States of optimizers that the proof of a training begins with, and faults in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from growkit.base.settings import Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.optimizer.optimizer import written_in
from growkit.planning.updates import law_of
from growkit.proof.training import StatePaths, compare_states, prove_training
from growkit.proof.weights import origin_of
from growkit.recipe.manifest import read_record
from growkit.results.proof import TrainingProof
from tests.conftest import load_strict, save_model
from tests.optimizer_state import FORMATS, grown, step

LLAMA = {"num_hidden_layers": 1}
QUICK: dict[str, Any] = {"prompts": 1, "length": 12}


def pair(place: Path, engine: str = "torch", **options: Any) -> tuple[Path, Path, Path]:
    """A source that has been trained, the state of its optimizer, and what both were grown to."""
    source = save_model(place / "source", "llama", dtype=torch.float64, **LLAMA)
    model = load_strict(source)
    every = list(model.parameters())
    decayed = [each for each in every if each.dim() > 1]
    others = [each for each in every if each.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 1e-2, "betas": (0.8, 0.9), **options})
    for number in range(3):
        step(model, optimizer, number)
    model.save_pretrained(source)
    state = FORMATS[engine][0](model, optimizer, source / "state")
    grown(source, state, place / "out")
    return source, state, place / "out"


def lineage_of(source: Path, out: Path) -> Any:
    """How the target was made."""
    after = Checkpoint(out)
    return origin_of(Checkpoint(source), after, read_record(after)).lineage


def unlike(source: Path, out: Path, state: Path) -> str:
    """What in the target's state does not grow from the source's."""
    before, after, lineage = Checkpoint(source), Checkpoint(out), lineage_of(source, out)
    places = StatePaths(state, written_in(out))
    return compare_states(places, before, after, lineage, law_of(lineage))[2]


def proved(source: Path, out: Path, state: Path, steps: int = 1) -> TrainingProof:
    """The proof of the training alone."""
    before, after = Checkpoint(source), Checkpoint(out)
    lineage = lineage_of(source, out)
    settings, device = Settings(**QUICK, steps=steps), torch.device("cpu")
    return prove_training(
        before, after, lineage, settings, device, StatePaths(state, written_in(out))
    )


Fault = tuple[str, Callable[[Any], None]]
"""What is said of it, and what it does to the content of an ``optimizer.pt``."""

QUIET = ("exp_avg_sq", "the step")
"""What ``amsgrad`` makes the training look away from, a little."""


def faults(content: Any) -> Iterator[Fault]:
    """Every setting of every group, every kind of moment of every parameter, and a step."""
    for number in range(len(content["param_groups"])):
        for key in ("lr", "weight_decay", "eps"):

            def group(found: Any, number: int = number, key: str = key) -> None:
                found["param_groups"][number][key] *= 2

            yield f"{key} of", group
    for number, kept in content["state"].items():
        for kind in sorted(kept.keys() - {"step"}):

            def moment(found: Any, number: int = number, kind: str = kind) -> None:
                found["state"][number][kind][..., :3] *= 2

            yield f"{kind} of", moment

    def later(found: Any) -> None:
        found["state"][2]["step"] += 1

    yield "the step of", later


@contextmanager
def spoiled(out: Path, spoil: Callable[[Any], None]) -> Iterator[None]:
    """With a fault in the file of a state, for a while."""
    file = out / "optimizer.pt"
    whole = file.read_bytes()
    content = torch.load(file, weights_only=True)
    spoil(content)
    torch.save(content, file)
    try:
        yield
    finally:
        file.write_bytes(whole)
