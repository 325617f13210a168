"""Findings as sentences, the same on the terminal and in the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_TRIED = "not tried: "
"""How the note of a way to ask begins that was not tried; why follows."""


def trainability_sentence(found: Mapping[str, Any]) -> str:
    """Whether copies can part in training (a ``growkit.proof.Trainability``)."""
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
        return "new capacity: every parameter gets a gradient"
    silent = found["without_gradient"]
    unseen = f" ({silent:,} get none on this text)" if silent else ""
    return f"new capacity: all copies get distinct gradients, for {copied:,} copied rows{unseen}"


def modes_sentence(modes: Sequence[Mapping[str, Any]]) -> str:
    """In which ways both models were asked (a list of ``growkit.proof.ModeResult``)."""
    failed = [mode["name"] for mode in modes if mode["kept"] is False]
    others = {m["name"]: m["note"] for m in modes if m["note"].startswith(NOT_TRIED)}
    tried = [mode["name"] for mode in modes if mode["name"] not in others]
    count = f"{len(tried)} of {len(modes)}" if others else f"{len(tried)}"
    what = f"; not the same with {', '.join(failed)}" if failed else f": {', '.join(tried)}"
    reasons: dict[str, list[str]] = {}
    for name, note in others.items():
        reasons.setdefault(note.removeprefix(NOT_TRIED), []).append(name)
    untried = "".join(f"; not tried: {', '.join(n)} ({why})" for why, n in reasons.items())
    return f"asked in {count} ways{what}{untried}"


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """Where two models part, and why (a ``growkit.proof.Fault``)."""
    layer = None if fault["layer"] is None else f"layer {fault['layer']}"
    places = [place for place in (layer, fault["component"], fault["tensor"]) if place]
    cause = f"; {fault['cause']}" if fault["cause"] else ""
    return f"at fault: {', '.join(places) or 'not known'}{cause}"
