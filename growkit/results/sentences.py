"""Findings as sentences, the same on the terminal, on the page and in the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_TRIED = "not tried: "
"""How the note of a way to ask begins that was not tried; why follows."""


def trainability_sentence(found: Mapping[str, Any]) -> str:
    """Whether copies can part in training (a ``growkit.results.proof.Trainability``)."""
    copied, stuck = found["copied"], found["identical_gradients"]
    names = found.get("silent_parameters") or []
    if stuck:
        return (
            f"new capacity: {stuck:,} of {copied:,} copied rows get identical "
            f"gradients (first in {found['first_identical']}) and would stay equal in training; "
            "--symmetry break lets them part"
        )
    if names:
        return f"new capacity: no gradient at all for {', '.join(names)}"
    if not copied:
        return f"new capacity: every parameter gets a gradient{_late(found)}"
    silent = found["without_gradient"]
    unseen = f" ({silent:,} get none on this text)" if silent else ""
    return (
        f"new capacity: all copies get distinct gradients, for {copied:,} copied rows{unseen}"
        f"{_late(found)}"
    )


def _late(found: Mapping[str, Any]) -> str:
    idle = found.get("idle_layers")
    if not idle:
        return ""
    layers = "1 layer that hands" if idle == 1 else f"{idle:,} layers that hand"
    given = "it is" if idle == 1 else "they are"
    return (
        f"; in {layers} on what {given} given, what is written gets it at once, the rest after the "
        "first step"
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
    return said


def modes_sentence(modes: Sequence[Mapping[str, Any]]) -> str:
    """In which ways both models were asked (a list of ``growkit.results.proof.ModeResult``)."""
    failed = [mode["name"] for mode in modes if mode["kept"] is False]
    others = {m["name"]: m["note"] for m in modes if m["note"].startswith(NOT_TRIED)}
    tried = [mode["name"] for mode in modes if mode["name"] not in others]
    what = f"; not the same with {', '.join(failed)}" if failed else f": {', '.join(tried)}"
    reasons: dict[str, list[str]] = {}
    for name, note in others.items():
        reasons.setdefault(note.removeprefix(NOT_TRIED), []).append(name)
    untried = "".join(f"; not tried: {', '.join(n)} ({why})" for why, n in reasons.items())
    return f"asked in {len(tried)} of {len(modes)} ways{what}{untried}"


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """Where two models part, and why (a ``growkit.results.proof.Fault``)."""
    cause = f"; {fault['cause']}" if fault["cause"] else ""
    return f"at fault: {fault_place(fault) or 'not known'}{cause}"


def fault_place(fault: Mapping[str, Any]) -> str:
    """Where two models part; empty if that is not known."""
    layer = None if fault.get("layer") is None else f"layer {fault['layer']}"
    places = (layer, fault.get("component"), fault.get("tensor"))
    return ", ".join(str(place) for place in places if place)


def next_step(result: Mapping[str, Any]) -> str | None:
    """What to do about a target that is not kept (a ``growkit.VerifyResult``).

    Returns:
        A sentence without its full stop; None if there is nothing to be done.
    """
    if result.get("kept"):
        return None
    if result.get("negative_control_caught") is False:
        return (
            "prove it on more: real text (--text FILE), more windows (--prompts) or longer ones "
            "(--length)"
        )
    again = (
        "make the target again from its growkit.json (growkit run OUT/growkit.json --source "
        "SRC --output AGAIN); if that is rejected too, please report it with this proof"
    )
    if result.get("first_lost_tensor"):
        return f"copy the target's weights again, in case they were damaged on the way; or {again}"
    if result.get("changed"):
        return f"put {result['changed'][0]} back as it was; or {again}"
    return _next_step_of_function(result, again)


def _next_step_of_function(result: Mapping[str, Any], again: str) -> str:
    """The same, where nothing is wrong with the files as far as anyone can see."""
    strict, native = result.get("strict_float64") or {}, result.get("native") or {}
    if _beyond(strict):
        if result.get("promise") == "exact" and result.get("weights_recovered") is None:
            return (
                "check that this is the model the target was made from, and keep growkit.json "
                "beside the target: with it the tensor at fault can be named"
            )
        return again
    if _beyond(native):
        return "store the target in a wider dtype, such as --dtype float32"
    kl, most = strict.get("kl_nats_per_token"), result.get("max_kl")
    if most is not None and (kl is None or kl > most):
        return "choose options that lose less, such as a higher --rank, or allow more (--max-kl)"
    if (result.get("trainability") or {}).get("trainable") is False:
        return "let copies part in training: make the target with --symmetry break"
    failed = [m for m in result.get("modes") or [] if m.get("kept") is False]
    if failed:
        return f"avoid {failed[0].get('name')} with this target, or {again}"
    return again


def _beyond(found: Mapping[str, Any]) -> bool:
    """Whether logits differ by more than they may."""
    relative, tolerance = found.get("relative"), found.get("tolerance")
    if tolerance is None:
        return bool(found) and relative is None
    return relative is None or relative > tolerance
