"""What is wrong with a target, by the fields of its proof, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import quote
from typing import Any

from growkit.base.limits import within
from growkit.results.sentences import fault_place, trainability_sentence

Found = Mapping[str, Any]

FEW = 100
"""Predictions below which a verdict says how few there were."""

MORE = (
    "prove it on more: real text (--text FILE), more windows (--prompts) or longer ones (--length)"
)
LEARNING, STUCK = "learning", "stuck"


def problem(result: Found) -> str | None:
    """What is wrong with a target, of a ``growkit.VerifyResult``; None if it is kept."""
    if result.get("kept"):
        return None
    return next((name for name, holds in _PROBLEMS.items() if holds(result)), "unknown")


def place(result: Found) -> str | None:
    """Where a target is not what it should be; None if that is not known."""
    changed = ", ".join(map(str, result.get("changed") or []))
    inside = fault_place(result.get("fault") or {}), result.get("first_difference")
    # Where every weight gives the source's back, what was changed beside them is at fault.
    first = (changed, *inside) if problem(result) == "changed" else (*inside, changed)
    failed = ", ".join(str(mode.get("name")) for mode in _failed(result))
    return next((str(each) for each in (*first, failed) if each), None)


def fault_sentence(result: Found) -> str:
    """Where two models part, and why (a ``growkit.VerifyResult`` with a fault)."""
    cause = f"; {result['fault']['cause']}" if result["fault"]["cause"] else ""
    return f"at fault: {place(result) or 'not known'}{cause}"


def training_problem(result: Found) -> str | None:
    """Why a target that computes what was promised was rejected all the same; else None."""
    found = problem(result)
    if found == LEARNING:
        return str(result["training"]["reason"])
    return trainability_sentence(result["trainability"]) if found == STUCK else None


def next_step(result: Found) -> str | None:
    """What to do about a target (a ``growkit.VerifyResult``).

    Returns:
        A sentence without its full stop; None if there is nothing to be done.
    """
    if result.get("kept"):
        return MORE if _few(result) else None
    return _STEPS[problem(result) or "unknown"](result)


def training_hint(result: Found) -> str | None:
    """What to do with an output (a ``growkit.GrowResult``) that is as it was promised.

    Returns:
        A sentence without its full stop; None if nothing was written, or something else comes
        first.
    """
    updates, proof = result.get("updates"), result.get("verification")
    if not updates or (proof and next_step(proof)):
        return None
    return (
        "train it with growkit.training.param_groups, which takes the source's learning rate; "
        "before a long run, growkit probe measures on your text whether that pays, compared with "
        "training the source for longer"
    )


def _few(result: Found) -> bool:
    predictions = result.get("predictions")
    return isinstance(predictions, int) and predictions < FEW


def _beyond(found: Found) -> bool:
    """Whether logits differ by more than they may."""
    relative, tolerance = found.get("relative"), found.get("tolerance")
    return bool(found) and not within(relative, tolerance)


def _failed(result: Found) -> list[Any]:
    return [mode for mode in result.get("modes") or [] if mode.get("kept") is False]


def _too_far(result: Found) -> bool:
    kl = (result.get("strict_float64") or {}).get("kl_nats_per_token")
    most = result.get("max_kl")
    return most is not None and not within(kl, most)


# The first that holds is what the verdict says.
_PROBLEMS: dict[str, Callable[[Found], bool]] = {
    "lost": lambda result: bool(result.get("first_lost_tensor")),
    "changed": lambda result: bool(result.get("changed")),
    "strict": lambda result: _beyond(result.get("strict_float64") or {}),
    "control": lambda result: result.get("negative_control_caught") is False,
    "native": lambda result: _beyond(result.get("native") or {}),
    "kl": _too_far,
    "mode": lambda result: bool(_failed(result)),
    LEARNING: lambda result: (result.get("training") or {}).get("kept") is False,
    STUCK: lambda result: (result.get("trainability") or {}).get("trainable") is False,
}


def _again(result: Found) -> str:
    """How to make the target once more, with the names that are known."""
    if result.get("weights_recovered") is None:
        return "make the target again from its source"
    source, target = (str(result.get(key)) for key in ("source", "target"))
    file, other = f"{target}/growkit.json", f"{target.removesuffix('.rejected')}-again"
    return (
        f"make the target again from its growkit.json (growkit run {quote(file)} --source "
        f"{quote(source)} --output {quote(other)}); if that is rejected too, please report it "
        "with this proof"
    )


def _changed_back(result: Found) -> str:
    name = result["changed"][0]
    values = next((v for v in result.get("changed_values") or [] if v["name"] == name), None)
    if values is None:
        return f"put {name} back as it was; or {_again(result)}"
    if values["expected"] is None:
        return f"put {name} back as it was (it is {_value(values['found'])}); or {_again(result)}"
    found, expected = _value(values["found"]), values["expected"]
    return f"set {name} back to {expected} (it is {found}); or {_again(result)}"


def instead_of(values: Found) -> str:
    """What a key of a config is and should be (a ``growkit.results.proof.ChangedValue``)."""
    return f"{_value(values['found'])} in place of {_value(values['expected'])}"


def _value(text: str | None) -> str:
    return "another" if text is None else text


def _by_logits(result: Found) -> str:
    if result.get("promise") == "exact" and result.get("weights_recovered") is None:
        return (
            "check that this is the model the target was made from, and that the target was not "
            "trained since; keep growkit.json with it, so that the tensor at fault can be named"
        )
    return _again(result)


def _to_learn(result: Found) -> str:
    training = result["training"]
    relative, tolerance = training.get("relative"), training.get("tolerance")
    if training.get("control_caught") is False:
        return "train both for longer (--steps), so that a deliberate fault shows"
    if tolerance is not None and within(relative, tolerance):
        return "grow the target again together with the state of the source's optimizer"
    return _again(result)


def _to_train(result: Found) -> str:
    found = result["trainability"]
    if found.get("silent_parameters") and not found.get("identical_gradients"):
        return (
            "prove it on other text (--text FILE), which may reach these parameters; or do without "
            "--trainability, if they need not train"
        )
    return "let copies part in training: make the target with --symmetry break"


_STEPS: dict[str, Callable[[Found], str]] = {
    "control": lambda result: MORE,
    "lost": lambda result: (
        "copy the target's weights again, in case they were damaged on the way; or "
        + _again(result)
    ),
    "changed": _changed_back,
    "strict": _by_logits,
    "native": lambda result: "store the target in a wider dtype, such as --dtype float32",
    "kl": lambda result: (
        "choose options that lose less, such as a higher --rank, or allow more (--max-kl)"
    ),
    "mode": lambda result: (
        f"avoid {_failed(result)[0].get('name')} with this target, or " + _again(result)
    ),
    LEARNING: _to_learn,
    STUCK: _to_train,
    "unknown": _again,
}
