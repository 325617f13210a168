"""Describe a family that growkit does not know, from its class in transformers.

The shapes of a checkpoint suggest axes, but 4096 may be many sizes. So the class is examined: small
configs show which shapes change with which key (``shapes``), and a small model, while it runs, what
each module is given (``running``). What is still open, and whether all of it is true, is tried: the
small model is grown as described and must compute the same in strict float64 (``trial``). Sizes for
which it does not are described as fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from growkit.algebra.axes import Pattern
from growkit.checkpoint.reading import Checkpoint
from growkit.errors import InputError
from growkit.families.described import described
from growkit.families.family import family_of
from growkit.inference.classes import ModelClass
from growkit.inference.proposing import Proposal, descriptions
from growkit.inference.running import see
from growkit.inference.trial import Trial, Trials
from growkit.inference.writing import as_yaml
from growkit.planning.plan import unused_tensors
from growkit.results.result import Result
from growkit.sources.source import find

MOST_TRIED = 12
"""Descriptions that are tried, if more than one is possible."""

ELSEWHERE = "describe its family as docs/adding-a-family.md says"


class Evidence(Result):
    """Why a tensor's pattern is what it is.

    Attributes:
        tensor: its name.
        pattern: what it reads and writes.
        by_number: what each dimension could be, by the number of the checkpoint alone.
        others: other patterns that its class leaves open.
    """

    tensor: str
    pattern: str
    by_number: list[list[str]]
    others: list[str]


class Inference(Result):
    """A family that was inferred, as ``growkit inspect --infer --json`` prints it.

    Attributes:
        model_class: of transformers.
        family: the description, as ``growkit.grow`` takes it.
        tensors: why patterns are what they are.
        trials: what became of a small random model that was grown like this.
        tried: number of descriptions that were tried.
        sure: whether every growth that could be tried computes the same.
        yaml: the description as a file, with all of this in comments.
    """

    model_class: str
    family: dict[str, Any]
    tensors: list[Evidence]
    trials: list[Trial]
    tried: int
    sure: bool
    yaml: str


def infer(folder: str | Path) -> Inference:
    """Describe the family of a model, as far as its class of transformers shows it.

    Args:
        folder: of the model, or its name on the Hub; only its headers are read.

    Raises:
        InputError: there is no such class, or it has parts that cannot be described; says which.
    """
    checkpoint = find(folder).whole()
    check_quantised(checkpoint)
    where = str(checkpoint.folder / "config.json")
    asked = ModelClass(checkpoint.config, where)
    if asked.layers > len(checkpoint.tensors):
        raise InputError(
            f"{where} promises {asked.layers:,} layers, but there are only "
            f"{len(checkpoint.tensors)} tensors; correct it, or add what is missing"
        )
    proposal = Proposal(asked, see(asked), frozenset(checkpoint.tensors))
    ways = proposal.ways()
    best: tuple[int, dict[str, Any], list[Trial]] | None = None
    tried = 0
    for description in islice(descriptions(proposal, ways), MOST_TRIED):
        trials = Trials(asked).all(description)
        tried += 1
        wrong = sum(trial.wrong for trial in trials)
        if best is None or wrong < best[0]:
            best = wrong, description, trials
        if not wrong:
            break
    assert best is not None
    _, description, trials = best
    fixed = {
        trial["axis"]: f"cannot grow: when it was tried, logits differed by {trial['error']:.1g}"
        for trial in trials
        if trial.wrong
    }
    if fixed:
        description["fixed"] = fixed
    _check_checkpoint(checkpoint, description)
    evidence = _evidence(checkpoint, description, {proposal.stored(t): w for t, w in ways.items()})
    sure = any(trial.exact for trial in trials) and not fixed
    found = Inference(
        model_class=asked.name,
        family=description,
        tensors=evidence,
        trials=trials,
        tried=tried,
        sure=sure,
        yaml="",
    )
    found["yaml"] = as_yaml(found)
    return found


def check_quantised(checkpoint: Checkpoint) -> None:
    """Refuse what growkit could not grow anyway.

    Raises:
        InputError: it is quantised.
    """
    try:
        family_of(checkpoint.config, checkpoint.where())
    except InputError as error:
        if "quantised" in str(error):
            raise


def _check_checkpoint(checkpoint: Checkpoint, description: Mapping[str, Any]) -> None:
    """Hold the checkpoint against its family.

    Raises:
        InputError: a tensor is missing, or has another shape than the class would have it.
    """
    family = described(description, "the inferred family")
    family.complete(checkpoint.config)
    unused_tensors(checkpoint, family)


def _evidence(
    checkpoint: Checkpoint, description: Mapping[str, Any], ways: Mapping[str, list[str]]
) -> list[Evidence]:
    """What the numbers of the checkpoint alone would say."""
    family = described(description, "the inferred family")
    sizes = family.sizes(checkpoint.config)
    forms: dict[str, int] = {}
    for _, pattern in family.patterns(checkpoint.config).items():
        for dimension in pattern.dimensions:
            forms[str(dimension)] = dimension.size(sizes)
    found = []
    for name, patterns in ways.items():
        entry = description["tensors"][name]
        said = entry if isinstance(entry, str) else str(entry["pattern"])
        dimensions = Pattern.parse(said).dimensions
        numbers = [each.size(sizes) for each in dimensions]
        found.append(
            Evidence(
                tensor=name,
                pattern=said,
                by_number=[[f for f, size in forms.items() if size == n] for n in numbers],
                others=[each for each in patterns if each != said],
            )
        )
    return found
