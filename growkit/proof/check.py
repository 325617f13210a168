"""Checks of the proof: files of this folder, or of ``checks`` in extras, that define ``CHECK``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growkit.base.lazy import registered
from growkit.results.proof_result import Section

if TYPE_CHECKING:
    from growkit.base.settings import Settings
    from growkit.model.model import Model
    from growkit.proof.logits import Function
    from growkit.proof.pair import Pair


@dataclass(frozen=True)
class Check:
    """A check that follows weights, files, logits and inference modes.

    Attributes:
        run: compares a pair, given what both models compute; None if there is nothing to compare.
        preflight: refuses, before anything is written, settings with which it could not run on a
            planned target.
        prepare: refuses before any long work what could not be compared; may return another pair to
            compare in its place.
        if_kept: whether it runs only if nothing failed before it.
        section: name of its section; by default that of its file.
    """

    run: Callable[[Pair, Function], Section | None]
    prepare: Callable[[Pair], Pair | None] | None = None
    if_kept: bool = False
    section: str = ""
    preflight: Callable[[Settings, Model], None] | None = None


def checks() -> Mapping[str, Check]:
    """All checks, by the names of their sections."""
    by_file = registered("checks", "CHECK", "growkit.proof")
    return {check.section or file: check for file, check in by_file.items()}
