"""Estimate a recipe before there is a machine for it: from headers, or a config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from growkit.checkpoint.carrying import carried_bytes
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.sources.source import find
from growkit.checkpoint.tensors import (
    TORCH_NAMES,
    Weights,
    main_dtype,
    total_bytes,
    total_parameters,
)
from growkit.checkpoint.writing import parse_bytes, shards_of
from growkit.families.added import temporary_family
from growkit.pipeline.estimate import (
    BASIS,
    disk_needed,
    memory_needed,
    proof_seconds,
    seconds_to_write,
)
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.planner import plan as planned
from growkit.recipe.recipe import Recipe
from growkit.results.operation import LargePlan


def plan(recipe: Recipe | str | Path, *, bandwidth: str | None = None) -> LargePlan:
    """Estimate the files, disk, memory and time of a recipe. Nothing is written.

    Args:
        recipe: as in ``growkit.run``. Of its source only headers are read, and where it has no
            weights, only its ``config.json``; of a model on the Hub no weights are fetched.
        bandwidth: bytes per second that can be read and written, e.g. ``2GB``; None where nothing
            but computing limits that.

    Raises:
        InputError: the recipe cannot be carried out, or needs weights to be planned.
    """
    limit = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_file(Path(recipe)))
    with temporary_family(recipe.family):
        source = find(recipe.source, weights=False)
        headers = source.headers()
        beside = carried_bytes(Folder(source.folder))
        return _plan(replace(recipe, source=source.name), headers, beside, limit)


def _plan(recipe: Recipe, source: Weights, beside: int, limit: int | None) -> LargePlan:
    prepared = planned(recipe, source)
    lineage = prepared.lineage
    target = lineage.target
    shards = shards_of(target.tensors, parse_bytes(recipe.shard_size))
    files = [shard.bytes for shard in shards]
    read, written = total_bytes(source.tensors), sum(files)
    warnings = list(prepared.warnings)
    if recipe.optimizer is not None:
        warnings.append(
            f"the disk does not count what the optimizer's state, {recipe.optimizer}, becomes; "
            "growkit run --dry-run reads it, and does"
        )
    return LargePlan(
        source=recipe.source,
        output=recipe.output,
        promise=lineage.promise,
        lost=lineage.lost or None,
        source_parameters=total_parameters(source.tensors),
        parameters=total_parameters(target.tensors),
        dtype=TORCH_NAMES[main_dtype(target.tensors)],
        bandwidth=limit,
        read=read,
        disk_needed=disk_needed(target, beside),
        files=len(files),
        largest_file=max(files),
        memory=memory_needed(source, target, recipe.verify),
        write_seconds=round(seconds_to_write(written, read + written, limit), 1),
        proof_seconds=proof_seconds(
            source, target, recipe.verify, exact=lineage.promise == "exact"
        ),
        basis=BASIS,
        warnings=warnings,
    )
