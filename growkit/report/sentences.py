"""Findings as sentences, the same on the terminal and in the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
    tried = [mode["name"] for mode in modes if "not tried" not in mode["note"]]
    if failed:
        return f"asked in {len(tried)} ways; not the same with {', '.join(failed)}"
    return f"asked in {len(tried)} ways: {', '.join(tried)}"


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """Where two models part, and why (a ``growkit.proof.Fault``)."""
    layer = None if fault["layer"] is None else f"layer {fault['layer']}"
    places = [place for place in (layer, fault["component"], fault["tensor"]) if place]
    cause = f"; {fault['cause']}" if fault["cause"] else ""
    return f"at fault: {', '.join(places) or 'not known'}{cause}"
