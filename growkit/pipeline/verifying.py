"""Prove two model folders that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.options import takes
from growkit.base.progress import Progress, Silent, shown
from growkit.base.settings import Settings
from growkit.model.checkpoint.scratch import report_faults
from growkit.planning.manifest import read_record
from growkit.proof.pair import Request
from growkit.proof.verdict import prove
from growkit.proof.weights import check_order
from growkit.results.proof_result import VerifyResult, name_result
from growkit.sources import find, open_both


@takes(Settings)
@report_faults()
@usual_torch()
def verify(
    source: str | Path,
    target: str | Path,
    settings: Settings = Settings(),
    *,
    optimizer: str | Path | None = None,
    adapter: str | Path | None = None,
    logits: Sequence[str | Path] = (),
    progress: Progress = Silent(),
    **options: Any,
) -> VerifyResult:
    """Compare two model folders: weights, and logits in strict float64 and the storage dtype.

    Logits come from transformers' own classes, loaded from the files. An exact promise holds if no
    logit differs by more than a multiple of the source's own rounding error, in strict float64 and
    in the storage dtype (``docs/explanation/numerics.md``). If the target's manifest records how it
    was made, the source's weights must also be recovered from the target's, bit for bit.

    Args:
        source: folder of the model that was grown, or its name on the Hub; see ``growkit.grow``.
        target: folder of the grown model.
        settings: settings of the proof.
        optimizer: the source's optimizer state that was grown with the target, for ``steps``;
            None for the state in the source's folder, if the target was grown with one.
        adapter: the source's adapter that was grown with the target, to compare both models with
            their adapters as well, in PEFT; or that was merged into the target's weights.
        logits: files of logits that other programs computed with the target, to compare with the
            source as well; see ``growkit.verify_logits``.
        progress: receives the progress, such as ``growkit.Bars()``.
        **options: fields of ``Settings``, in place of those in ``settings``; None for these.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    settings = replace(settings, **chosen)
    state, of_source = (Path(path) if path is not None else None for path in (optimizer, adapter))
    if state is not None and settings.steps is None:
        raise InputError(
            f"the optimizer's state {state} is only for the training of both models; add --steps"
        )
    one, other = find(source), find(target)
    before, after = open_both(one, other)
    recipe = read_record(after.opened)
    check_order(before, after, recipe)
    files = [Path(file) for file in logits]
    request = Request(before, after, settings, recipe, state, of_source, files)
    with shown(progress):
        verdict = prove(request)
    return name_result(verdict, one.name, other.name)
