"""Growing and converting as one call: a recipe of one step, carried out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkit.base.progress import Progress, Silent
from growkit.base.settings import Settings, settings_of
from growkit.families.described import load_description
from growkit.pipeline.surgery import run
from growkit.planning.operation import Value
from growkit.recipe.operations import DEFAULT_METHOD
from growkit.recipe.recipe import DEFAULT_SHARD_SIZE, FORMATS, ConvertStep, GrowStep, Recipe
from growkit.results.operation import GrowResult


def grow(
    source: str | Path,
    output: str | Path,
    *,
    method: str = DEFAULT_METHOD,
    seed: int = 0,
    dtype: str | None = None,
    shard_size: str = DEFAULT_SHARD_SIZE,
    base_model: str | None = None,
    family: str | Path | Mapping[str, Any] | None = None,
    optimizer: str | Path | None = None,
    format: str = FORMATS[0],  # noqa: A002
    verify: Settings | bool = True,
    overwrite: bool = False,
    proof_only: bool = False,
    dry_run: bool = False,
    progress: Progress = Silent(),
    **options: Value | None,
) -> GrowResult:
    """Grow a checkpoint into a larger one that computes the same function.

    Args:
        source: model folder; or a model on the Hub, ``hf://ORG/NAME@REVISION``, or ``ORG/NAME``
            where there is no folder ``ORG``.
        output: folder to make.
        method: name of a growth method.
        seed: of the random splits.
        dtype: torch name of the dtype of the output; None for the source's. A narrower one rounds
            every weight of the source once, before anything else is done, and what is promised
            holds of the source rounded so.
        shard_size: upper limit of one output file, e.g. ``5GB``.
        base_model: what the model card calls the source, ``ORG/NAME`` on the Hub; None for nothing.
        family: describes the source's family, for one that growkit does not know: a YAML file, or
            what stands in it (``growkit.infer`` proposes one).
        optimizer: the state of the source's optimizer, which is grown and written beside the
            weights in the same format: an ``optimizer.pt`` or a checkpoint folder of Trainer with
            it, or a folder of torch.distributed.checkpoint.
        format: of the files with the weights: ``safetensors``, which transformers loads, or ``dcp``
            for those of torch.distributed.checkpoint.
        verify: what the proof compares; True for the default settings, False for no proof.
        overwrite: replace an output that growkit wrote.
        proof_only: once the output has kept its promise, delete its weights and keep the rest: the
            proof of a recipe by which ``growkit.load`` makes them of the source again.
        dry_run: plan only, touch nothing.
        progress: where progress is shown.
        **options: the method's sizes, e.g. ``hidden="x2"`` or ``hidden=2048``, and its other
            options: of those that copy ``symmetry``, where ``"break"`` splits weights at random so
            that copies part in training and ``"keep"`` makes plain copies, and ``snr_db``, the
            signal-to-noise ratio of the random splits in dB, at least 4.78.

    Returns:
        What was done. ``kept`` is False if the promise was broken; the output is then called
        ``OUT.rejected``.

    Raises:
        InputError: the source, a size or the output cannot be used; nothing was written.
    """
    step = GrowStep(method, _given(options))
    written = dtype, shard_size, base_model, _description(family), _path(optimizer), format
    recipe = Recipe(str(source), (step,), str(output), settings_of(verify), seed, *written)
    return run(
        recipe,
        reads=_files(family),
        overwrite=overwrite,
        proof_only=proof_only,
        dry_run=dry_run,
        progress=progress,
    )


def convert(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    shard_size: str = DEFAULT_SHARD_SIZE,
    base_model: str | None = None,
    optimizer: str | Path | None = None,
    format: str = FORMATS[0],  # noqa: A002
    verify: Settings | bool = True,
    overwrite: bool = False,
    proof_only: bool = False,
    dry_run: bool = False,
    progress: Progress = Silent(),
    **options: Value | None,
) -> GrowResult:
    """Turn a checkpoint into another attention variant, or store it in another layout.

    Args:
        source: model folder, or one on the Hub; see ``grow``.
        output: folder to make.
        to: name of the variant or layout.
        dtype: see ``grow``, as for the rest, the result and the errors.
        shard_size: see there.
        base_model: see there.
        optimizer: see there.
        format: see there.
        verify: see there.
        overwrite: see there.
        proof_only: see there.
        dry_run: see there.
        progress: see there.
        **options: the conversion's options, e.g. ``gamma="gated"``.
    """
    step = ConvertStep(to, _given(options))
    written = dtype, shard_size, base_model, None, _path(optimizer), format
    recipe = Recipe(str(source), (step,), str(output), settings_of(verify), 0, *written)
    return run(
        recipe,
        overwrite=overwrite,
        proof_only=proof_only,
        dry_run=dry_run,
        progress=progress,
    )


def _description(family: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What stands in the file."""
    return load_description(family) if isinstance(family, str | Path) else family


def _files(family: object) -> list[str | Path]:
    return [family] if isinstance(family, str | Path) else []


def _path(optimizer: str | Path | None) -> str | None:
    return None if optimizer is None else str(optimizer)


def _given(options: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in options.items() if value is not None}
