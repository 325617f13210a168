"""The top of a page: the verdict, what follows from it, and what people look for under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from re import sub
from typing import Any

from growkit.report.markup import escape, facts, is_number
from growkit.report.summary import summary
from growkit.results.sentences import fault_place, next_step

Found = Mapping[str, Any]

PROMISES = {
    "exact": "the target is to compute the same function as the source",
    "bounded": "the target may differ from the source, by what is measured here",
    "different": "the target is to be another function; how far away is measured here",
}
SIGNS = {"good": "✓", "warn": "!", "bad": "✗"}


def verdict_of(result: Found) -> tuple[str, str]:
    """Its colour and its words."""
    promise, reason = result.get("promise"), str(result.get("reason"))
    if reason.startswith("no verdict"):
        return "warn", "No verdict"
    if not result.get("kept"):
        as_asked = promise != "exact" or reason.startswith("not as asked")
        return "bad", "Not as asked" if as_asked else "Not preserved"
    if promise == "exact":
        return "good", "Preserved"
    return "warn", f"{promise}, as asked for".capitalize()


def header(result: Found, steps: Sequence[str] = ()) -> str:
    """What was tried and the verdict in a box; below it what people look for.

    Args:
        result: of a proof.
        steps: how the target was made, as far as that is known.
    """
    kind, verdict = verdict_of(result)
    promise = str(result.get("promise"))
    meaning = f" ({PROMISES[promise]})" if promise in PROMISES else ""
    first = _lost(result) if result.get("kept") else facts(to_do(result), "to-do")
    return (
        f'<header><div class="verdict {kind}"><p>{_tried(result, steps)}</p>'
        f'<h1><span aria-hidden="true">{SIGNS[kind]}</span> '
        f'{escape(verdict)}</h1>{first}<p class="reason">{_reason(result, verdict)}.</p>'
        f"<p>Promise: <strong>{escape(promise)}</strong>{meaning}. {_after(result)}</p></div>"
        f"{_glance(result)}"
        f"{facts({key: result.get(key) for key in ('source', 'target')})}</header>"
    )


def _tried(result: Found, steps: Sequence[str]) -> str:
    """Which model is held against which, and how it was made of it."""
    source, target = (
        f"<strong>{escape(Path(str(result.get(key))).name)}</strong>"
        for key in ("source", "target")
    )
    if not steps:
        return f"{target}, held against its source {source}"
    return f"{target}, made from {source} ({escape('; '.join(steps))})"


def _after(result: Found) -> str:
    """What to do with a target that is as it was promised."""
    if not result.get("kept"):
        return ""
    if result.get("promise") == "exact":
        if (result.get("trainability") or {}).get("trainable") is False:
            return "Use it in the place of its source; before training, read “new capacity” below."
        return "Nothing is left to be done: use it or train it in the place of its source."
    return "If too much is lost, choose options that lose less; --max-kl sets a limit."


def _glance(result: Found) -> str:
    rows = "".join(
        f"<div><dt>{name}</dt>"
        f"<dd><strong>{escape(line.first)}</strong> {escape(line.then)}</dd></div>"
        for name, line in summary(result).items()
    )
    return f'<dl class="glance">{rows}</dl>' if rows else ""


def _reason(result: Found, verdict: str) -> str:
    """The verdict's sentence, without what the heading says."""
    reason = str(result.get("reason")).removeprefix(f"{verdict.lower()}: ")
    reason = reason.removeprefix(f"{verdict.lower()} ({result.get('lost')}): ")
    reason = escape(reason[:1].upper() + reason[1:])
    # Browsers would break a line after the hyphen of 1e-14.
    return sub(r"[\d.]+e-\d+", r'<span class="whole">\g<0></span>', reason)


def _lost(result: Found) -> str:
    """What a conversion gave up, which nobody may overlook."""
    lost = result.get("lost")
    return f'<p class="lost">Lost: {escape(lost)}.</p>' if lost else ""


def to_do(result: Found) -> dict[str, Any]:
    """Where it failed, why, and what to do next; what is not known is None."""
    fault = result.get("fault") or {}
    measured, most = result.get("strict_float64") or {}, result.get("max_kl")
    kl = measured.get("kl_nats_per_token")
    too_much = None
    if is_number(kl) and is_number(most) and kl > most:
        too_much = f"{kl:.3g} nats per token of KL are more than the {most:.3g} allowed"
    changed = ", ".join(map(str, result.get("changed") or [])) or None
    failed = [str(m.get("name")) for m in result.get("modes") or [] if m.get("kept") is False]
    return {
        "Where": fault_place(fault)
        or result.get("first_difference")
        or changed
        or ", ".join(failed)
        or None,
        "Why": fault.get("cause")
        or (
            f"{kl:.3g} nats per token of KL are more than the {most:.3g} allowed"
            if too_much
            else None
        ),
        "Lost": result.get("lost"),
        "Next": next_step(result),
    }
