"""Prove two model folders that are there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import usual_torch
from growkit.base.progress import Progress, Silent
from growkit.base.settings import Settings
from growkit.checkpoint.scratch import report_faults
from growkit.planning.manifest import read_record
from growkit.proof.pair import Request
from growkit.proof.verdict import prove
from growkit.proof.weights import check_order
from growkit.results.proof_result import VerifyResult, name_result
from growkit.sources import find, pair


@report_faults()
@usual_torch()
def verify(
    source: str | Path,
    target: str | Path,
    settings: Settings = Settings(),
    *,
    text: str | Path | None = None,
    device: str | None = None,
    prompts: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    trainability: bool | None = None,
    max_kl: float | None = None,
    steps: int | None = None,
    optimizer: str | Path | None = None,
    adapter: str | Path | None = None,
    progress: Progress = Silent(),
) -> VerifyResult:
    """Compare two model folders: weights, and logits in strict float64 and the storage dtype.

    Logits come from transformers' own classes, loaded from the files. An exact promise holds if no
    logit differs by more than a multiple of the source's own rounding error, in strict float64 and
    in the storage dtype (``docs/explanation/numerics.md``). If the target's manifest records how it
    was made, the source's weights must also be recovered from the target's, bit for bit.

    Args:
        source: folder of the model that was grown, or its name on the Hub; see ``growkit.grow``.
        target: folder of the grown model.
        settings: settings of the proof. The following arguments override them.
        text: file with real text, for the source's tokenizer; None for random tokens.
        device: see ``Settings``.
        prompts: number of windows of text, or of random prompts; None for 8, or for 4 if every
            weight was recovered.
        length: tokens in each prompt, at most the model's longest context; None for 512, or for 48
            if every weight was recovered.
        seed: seed of the random prompts.
        trainability: whether every parameter of the target must be able to train.
        max_kl: largest accepted KL, in nats per token; None for no limit.
        steps: AdamW steps that both models take in strict float64, to compare what they learn;
            None for no training.
        optimizer: the source's optimizer state that was grown with the target, for these steps;
            None for the state in the source's folder, if the target was grown with one.
        adapter: the source's adapter that was grown with the target, to compare both models with
            their adapters as well, in PEFT.
        progress: receives the progress, such as ``growkit.Bars()``.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    chosen: dict[str, Any] = {"text": text, "device": device, "prompts": prompts, "length": length}
    chosen |= {"seed": seed, "trainability": trainability, "max_kl": max_kl, "steps": steps}
    settings = replace(settings, **{k: v for k, v in chosen.items() if v is not None})
    state, of_source = (Path(path) if path is not None else None for path in (optimizer, adapter))
    if state is not None and settings.steps is None:
        raise InputError(
            f"the optimizer's state {state} is only for the training of both models; add --steps"
        )
    one, other = find(source), find(target)
    before, after = pair(one, other)
    recipe = read_record(after)
    check_order(before, after, recipe)
    request = Request(before, after, settings, recipe, progress, state, of_source)
    verdict = prove(request)
    return name_result(verdict, one.name, other.name)
