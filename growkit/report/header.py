"""The top of a page: the verdict, what follows from it, and what people look for under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growkit.report.markup import begun, escape, facts, flowing
from growkit.report.summary import summary
from growkit.results.advice import failed, next_step

Found = Mapping[str, Any]

PROMISES = {
    "exact": "the target is to compute the same function as the source",
    "bounded": "the target may differ from the source, by what is measured here",
    "different": "the target is to be another function; how far away is measured here",
}
SIGNS = {"good": "✓", "warn": "!", "bad": "✗"}

KEPT = {
    "exact": "Nothing is left to be done: use it or train it in the place of its source.",
    "bounded": "If too much is lost, choose options that lose less; --max-kl sets a limit.",
    "different": "Train it before it takes the place of its source.",
}
"""What to do with a target that is as it was promised."""


def verdict_of(result: Found) -> tuple[str, str]:
    """The color of a verdict, and its words."""
    words = str(result.get("verdict") or ("kept" if result.get("kept") else "not kept"))
    kind = "good" if result.get("promise") == "exact" else "warn"
    if not result.get("kept"):
        kind = "warn" if words == "no verdict" else "bad"
    return kind, words.capitalize()


def header(result: Found, manifest: Found, steps: Sequence[str] = ()) -> str:
    """What was tried and the verdict in a box; below it what people look for.

    Args:
        result: of a proof.
        manifest: the target's, as far as there is one.
        steps: how the target was made, as far as that is known.
    """
    kind, verdict = verdict_of(result)
    promise = str(result.get("promise"))
    meaning = f" ({PROMISES[promise]})" if promise in PROMISES else ""
    to_be_done = to_do(result)
    listed = {"Next": to_be_done["Next"]} if result.get("kept") else to_be_done
    lost = _lost(result) if result.get("kept") else ""
    told = "".join(f'<p class="reason">{each}.</p>' for each in _reasons(result))
    return (
        f'<header><div class="verdict {kind}"><p>{_tried(result, steps)}</p>'
        f'<h1><span aria-hidden="true">{SIGNS[kind]}</span> '
        f"{escape(verdict)}</h1>{lost}{facts(listed, 'to-do')}{told}"
        f"<p>Promise: <strong>{escape(promise)}</strong>{meaning}. {_after(result, manifest)}</p>"
        f"{_warnings(manifest)}</div>"
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
    return f"{target}, made from {source} ({flowing('; '.join(steps))})"


def _after(result: Found, manifest: Found) -> str:
    """What to do with a target that is as it was promised, and what it loads with."""
    loads = manifest.get("loads_with")
    told = [f"It loads with {flowing(str(loads))}."] if loads else []
    if manifest.get("not_kept"):
        told = ["Its weights are not kept: growkit.load makes them of the source."]
    if not result.get("kept"):
        return told[0] if loads else ""
    what = KEPT.get(str(result.get("promise")), "")
    if result.get("promise") == "bounded" and result.get("max_kl") is not None:
        what = "Use it where as much may be lost as the limit allows."
    if result.get("promise") == "exact":
        if (result.get("trainability") or {}).get("trainable") is False:
            what = "Use it in the place of its source; before training, read “new capacity” below."
        elif next_step(result):
            what = ""
        elif told:
            what = "Use it or train it in the place of its source."
    return " ".join([what, *told])


def _warnings(manifest: Found) -> str:
    """What should be known before the target is used, as its manifest says."""
    warnings = manifest.get("warnings")
    listed = warnings if isinstance(warnings, list) else []
    return "".join(f"<p>! {begun(each)}.</p>" for each in listed)


def _glance(result: Found) -> str:
    rows = "".join(
        f"<div><dt>{name}</dt>"
        f"<dd><strong>{flowing(line.first)}</strong> {flowing(line.then)}</dd></div>"
        for name, line in summary(result).items()
    )
    return f'<dl class="glance">{rows}</dl>' if rows else ""


def _reasons(result: Found) -> list[str]:
    """The sentences below the verdict."""
    findings = result.get("findings") or []
    shown = [each for each in findings if each["kept"] is False]
    if not shown:
        named = ("weights", "files", "strict_float64", "training")
        shown = [each for each in findings if each["name"] in named]
    sentences = [*(each["sentence"] for each in shown), *(result.get("notes") or [])]
    return [begun(each) for each in sentences]


def _lost(result: Found) -> str:
    """What a conversion gave up, which nobody may overlook."""
    lost = result.get("lost")
    return f'<p class="lost">Lost: {flowing(lost)}.</p>' if lost else ""


def to_do(result: Found) -> dict[str, Any]:
    """Where it failed, why, and what to do next; what is not known is None."""
    found = failed(result.get("findings") or [])
    return {
        "Where": found and found["place"],
        "Why": (result.get("fault") or {}).get("cause"),
        "Lost": result.get("lost"),
        "Next": next_step(result),
    }
