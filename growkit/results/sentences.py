"""Findings as sentences, the same on the terminal, on the page and in the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def trainability_sentence(found: Mapping[str, Any]) -> str:
    """Whether copies can part in training (a ``growkit.results.proof.Trainability``)."""
    copied, stuck = found["copied"], found["identical_gradients"]
    names = found.get("silent_parameters") or []
    if stuck:
        return (
            f"{stuck:,} of {copied:,} copied rows get identical "
            f"gradients (first in {found['first_identical']}) and would stay equal in training; "
            "--symmetry break lets them part"
        )
    if names:
        return f"no gradient at all for {', '.join(names)}"
    if not copied:
        return f"every parameter gets a gradient{_late(found)}"
    silent = found["without_gradient"]
    unseen = f" ({silent:,} get none on this text)" if silent else ""
    return f"all copies get distinct gradients, for {copied:,} copied rows{unseen}{_late(found)}"


def _late(found: Mapping[str, Any]) -> str:
    idle = found.get("idle_layers")
    if not idle:
        return ""
    start = "new layer starts" if idle == 1 else f"{idle:,} new layers start"
    return (
        f"; the {start} as identity: the matrices that write the output learn from the first step, "
        "the rest from the second"
    )


FEW_NAMES = 4
"""Names of parameters in a sentence, at most."""


def optimizer_sentence(found: Mapping[str, Any]) -> str:
    """What became of an optimizer's state (a ``growkit.results.operation.OptimizerResult``)."""
    step = "" if found["step"] is None else f" after {found['step']:,} steps"
    said = f"optimizer state{step}: {', '.join(found['moments'])} grown with the weights"
    names = list(found["reset"])
    if names:
        more = f" and {len(names) - FEW_NAMES} more" if len(names) > FEW_NAMES else ""
        said += f"; reset: {', '.join(names[:FEW_NAMES])}{more} ({found['reset'][names[0]]})"
    left = [f"{name} ({why})" for name, why in found["beside"].items() if why.startswith("left")]
    if left:
        said += f"; not taken along: {', '.join(left[:FEW_NAMES])}"
    if found["assumed"]:
        said += f"; it does not name its parameters, which were assumed {found['assumed']}"
    return said


def recovered_sentence(recovered: int, every: int) -> str:
    """How many of the source's tensors come back from the written weights, bit for bit."""
    count = every - recovered
    went = "the remaining one went" if count == 1 else f"the remaining {count:,} went"
    rest = f", {went} into tensors that are computed from them" if count else ""
    return f"{recovered:,} of {every:,} tensors are recovered bit for bit{rest}"


def too_much(kl: float, most: float) -> str:
    """That a KL is above its limit, with as many digits as show it."""
    digits = next((n for n in (3, 6, 9) if f"{kl:.{n}g}" != f"{most:.{n}g}"), 17)
    return f"{kl:.{digits}g} nats per token of KL are more than the {most:g} allowed"


def counted(number: int, name: str) -> str:
    """A number of things, e.g. ``1 prediction``, ``510 predictions``."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def fault_place(fault: Mapping[str, Any]) -> str:
    """Where two models part; empty if that is not known."""
    layer = None if fault.get("layer") is None else f"layer {fault['layer']}"
    places = (layer, fault.get("component"), fault.get("tensor"))
    return ", ".join(str(place) for place in places if place)


def class_sentence(changes: Sequence[Mapping[str, Any]]) -> str | None:
    """The class of the source and that of the output; None where it stays.

    Args:
        changes: of ``config.json`` (each a ``growkit.results.operation.ConfigChange``).
    """
    for key in ("architectures", "model_type"):
        for each in changes:
            if each["key"] == key and each["before"] and each["after"]:
                was, now = (each[side].strip('[]"') for side in ("before", "after"))
                return f"class: {was} → {now}"
    return None
