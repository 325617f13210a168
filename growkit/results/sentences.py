"""Results as sentences, and what to do next: the same on the terminal, the page and the card."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from growkit.base.limits import within
from growkit.results.proof import Finding, VerifyResult

Found = Mapping[str, Any]


def trainability_sentence(found: Found) -> str:
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


def _late(found: Found) -> str:
    idle = found.get("idle_layers")
    if not idle:
        return ""
    start = "new layer starts" if idle == 1 else f"{idle:,} new layers start"
    return (
        f"; the {start} as identity: the matrices that write the output learn from the first step, "
        "the rest from the second"
    )


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


def fault_place(fault: Found) -> str:
    """Where two models part; empty if that is not known."""
    layer = None if fault.get("layer") is None else f"layer {fault['layer']}"
    places = (layer, fault.get("component"), fault.get("tensor"))
    return ", ".join(str(place) for place in places if place)


def class_sentence(changes: Sequence[Found]) -> str | None:
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


# What to do next.

MORE = (
    "prove it on more: real text (--text FILE), more windows (--prompts) or longer ones (--length)"
)


def failed(findings: Sequence[Finding]) -> Finding | None:
    """The finding that decides against a target; None if the target is kept."""
    return next((each for each in findings if each["kept"] is False), None)


def next_step(result: Found) -> str | None:
    """What to do about a target (a ``growkit.VerifyResult``), without a full stop; None: nothing.

    Advice on a failed finding comes before advice on a kept one.
    """
    findings = result.get("findings") or []
    first = failed(findings)
    return first["advice"] if first else next((f["advice"] for f in findings if f["advice"]), None)


def name_result(result: VerifyResult, source: str, target: str) -> VerifyResult:
    """Set the published names of both folders, and the advice, which mentions them."""
    result.source, result.target = source, target
    for finding in result.findings:
        if finding.kept is False or finding.name == "amount":
            finding.advice = _advice(finding.name, result)
    return result


def training_hint(result: Found) -> str | None:
    """How to train an output (a ``growkit.GrowResult``), without a full stop.

    None if nothing was written, or its proof gives other advice.
    """
    updates, proof = result.get("updates"), result.get("verification")
    if not updates or (proof and next_step(proof)):
        return None
    return (
        "train it with growkit.training.param_groups, which takes the source's learning rate; "
        "before a long run, growkit probe measures on your text whether that pays, compared with "
        "training the source for longer"
    )


def value_sentence(values: Found) -> str:
    """The value of a config key and the expected one (``growkit.results.proof.ChangedValue``)."""
    found, expected = (_value(values[key]) for key in ("found", "expected"))
    return f"{found} in place of {expected}"


def _value(text: str | None) -> str:
    return "another" if text is None else text


def _advice(name: str, result: VerifyResult) -> str:
    again = _make_again(result)
    known = {
        "weights": "copy the target's weights again, in case they were damaged on the way; or "
        + again,
        "strict_float64": again,
        "negative_control": MORE,
        "amount": MORE,
        "native": "store the target in a wider dtype, such as --dtype float32",
        "max_kl": "choose options that lose less, such as a higher --rank, or allow more "
        "(--max-kl)",
    }
    if name == "strict_float64" and result.promise == "exact" and result.weights_recovered is None:
        return (
            "check that this is the model the target was made from, and that the target was not "
            "trained since; keep growkit.json with it, so that the tensor at fault can be named"
        )
    if name == "files":
        return f"{_restore(result)}; or {again}"
    if name == "training":
        return _training_advice(result.training or {}, again)
    if name == "trainability":
        return _trainability_advice(result.trainability or {})
    return known.get(name, f"avoid {name} with this target, or {again}")


def _make_again(result: VerifyResult) -> str:
    """How to make the target once more."""
    if result.weights_recovered is None:
        return "make the target again from its source"
    output = f"{result.target.removesuffix('.rejected')}-again"
    file = f"{result.target}/growkit.json"
    return (
        f"make the target again from its growkit.json (growkit run {quote(file)} --source "
        f"{quote(result.source)} --output {quote(output)}); if that is rejected too, please report "
        "it with this proof"
    )


def _restore(result: VerifyResult) -> str:
    """How to undo the first change next to the weights."""
    name = result.changed[0]
    values = next((each for each in result.changed_values if each["name"] == name), None)
    if values is None:
        return f"put {name} back as it was"
    if values["expected"] is None:
        return f"put {name} back as it was (it is {_value(values['found'])})"
    return f"set {name} back to {values['expected']} (it is {_value(values['found'])})"


def _training_advice(training: Found, again: str) -> str:
    if training.get("control_caught") is False:
        return "train both for longer (--steps), so that a deliberate fault shows"
    tolerance = training.get("tolerance")
    if tolerance is not None and within(training.get("relative"), tolerance):
        return "grow the target again together with the state of the source's optimizer"
    return again


def _trainability_advice(found: Found) -> str:
    if found.get("silent_parameters") and not found.get("identical_gradients"):
        return (
            "prove it on other text (--text FILE), which may reach these parameters; or do without "
            "--trainability, if they need not train"
        )
    return "let copies part in training: make the target with --symmetry break"
