"""A family that was inferred, as a file that people read, change and use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from growkit.results.versions import versions

if TYPE_CHECKING:
    from growkit.inference.inferring import Evidence, Inference
    from growkit.inference.trial import Trial


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
