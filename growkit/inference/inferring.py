"""Describe a family that growkit does not know, from its class in transformers.

The shapes of a checkpoint suggest axes, but 4096 may be many sizes. So the class is examined: small
configs show which shapes change with which key (``shapes``), and a small model, while it runs, what
each module is given (``running``). What is still open, and whether all of it is true, is tried: the
small model is grown as described and must compute the same in strict float64 (``trial``). Sizes for
which it does not are described as fixed.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from growkit.algebra.axes import Pattern
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.families.family import described, refuse_quantised
from growkit.inference.classes import ModelClass
from growkit.inference.proposing import Proposal, descriptions
from growkit.inference.running import see
from growkit.inference.trial import Trials
from growkit.planning.plan import unused_tensors
from growkit.results import versions
from growkit.results.inspection import Evidence, Inference, Trial
from growkit.sources import find

if TYPE_CHECKING:
    from growkit.results.inspection import Trial


def as_yaml(found: Inference) -> str:
    """The description, with what speaks for it in comments."""
    return "".join(f"{line}\n" for line in (*_head(found), *_body(found)))


def _head(found: Inference) -> Iterator[str]:
    version = versions().get("transformers", "")
    yield f"# Inferred from {found['model_class']} of transformers {version}. To be used as"
    yield "#   growkit grow SRC OUT --family THIS-FILE ..."
    yield "# What grew in a small random model of the class, and computed the same in float64:"
    for trial in found["trials"]:
        yield f"#   {_told(trial)}"
    others = found["tried"] - 1
    if others:
        yield f"# It is the best of {found['tried']} descriptions that were tried."
    yield f"# {_sure(found)}"


def _told(trial: Trial) -> str:
    options = ", ".join(f"{name} {value}" for name, value in trial["options"].items())
    if trial["error"] is None:
        return f"{options}: not possible ({trial['why']})"
    outcome = "the same" if trial.exact else "NOT the same"
    return f"{options}: {outcome}, within {trial['error']:.1e}"


def _sure(found: Inference) -> str:
    if found["sure"]:
        return "Sure: everything that could be tried computes the same."
    if not any(trial.exact for trial in found["trials"]):
        return "Not sure: nothing that was tried computes the same. Correct it before you use it."
    return "Sure of what may grow; what is fixed below depends on something that is not described."


def _body(found: Inference) -> Iterator[str]:
    evidence = {each["tensor"]: each for each in found["tensors"]}
    for key, value in found["family"].items():
        if not isinstance(value, Mapping):
            yield f"{key}: {_inline(value)}"
            continue
        yield f"{key}:" if value else f"{key}: {{}}"
        for name, entry in value.items():
            why = f"  # {_why(evidence[name])}" if key == "tensors" else ""
            yield f"  {_inline(name)}: {_inline(entry)}{why}"


def _why(evidence: Evidence) -> str:
    """How sure a pattern is, by the checkpoint's own numbers and by its class."""
    if evidence["others"]:
        return f"tried; by its shape also {' or '.join(evidence['others'])}"
    open_ones = [each for each in evidence["by_number"] if len(each) > 1]
    if not open_ones:
        return "its numbers are those of nothing else"
    could = "; ".join(dict.fromkeys(" or ".join(each) for each in open_ones))
    return f"its class says so; by its numbers {could}"


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


MOST_TRIED = 12
"""Descriptions that are tried, if more than one is possible."""


def infer(folder: str | Path) -> Inference:
    """Describe the family of a model, as far as its class of transformers shows it.

    Args:
        folder: of the model, or its name on the Hub; only its headers are read.

    Raises:
        InputError: there is no such class, or it has parts that cannot be described; says which.
    """
    checkpoint = find(folder).whole()
    refuse_quantised(checkpoint.config, checkpoint.where())
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
