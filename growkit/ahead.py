"""Estimate a recipe before there is a machine for it: from headers, or a config alone."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heapreplace
from pathlib import Path

from growkit.checkpoint.carrying import carried_bytes
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import (
    TORCH_NAMES,
    Weights,
    main_dtype,
    total_bytes,
    total_parameters,
)
from growkit.checkpoint.writing import parse_bytes, shards_of
from growkit.errors import InputError
from growkit.estimate import BASIS, disk_needed, memory_needed, proof_seconds, seconds_to_write
from growkit.families.added import knowing
from growkit.planner import plan as planned
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.recipe import Recipe
from growkit.results.planned import LargePlan
from growkit.results.sentences import counted
from growkit.sources.source import find

MOST_RANKS = 100_000


def plan(recipe: Recipe | str | Path, *, ranks: int = 1, bandwidth: str | None = None) -> LargePlan:
    """Estimate the files, disk, memory and time of a recipe. Nothing is written.

    Args:
        recipe: as in ``growkit.run``. Of its source only headers are read, and where it has no
            weights, only its ``config.json``; of a model on the Hub no weights are fetched. The
            source may also lie on a store (``s3://BUCKET/MODEL``, ``https://HOST/MODEL``).
        ranks: number of processes that share the output's files, each with two cores.
        bandwidth: bytes per second that all of them together can read and write, e.g. ``2GB``;
            None where nothing but computing limits them.

    Raises:
        InputError: the recipe cannot be carried out, or needs weights to be planned.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks:,} ranks cannot be planned for; give 1 to {MOST_RANKS:,}")
    limit = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_file(Path(recipe)))
    with knowing(recipe.family):
        source = find(recipe.source, weights=False)
        headers = source.headers()
        folder = source.folder  # of a store, nothing beside the weights is looked at
        beside = carried_bytes(Folder(folder)) if folder.is_dir() else 0
        return _plan(replace(recipe, source=source.name), headers, beside, ranks, limit)


def _plan(recipe: Recipe, source: Weights, beside: int, ranks: int, limit: int | None) -> LargePlan:
    prepared = planned(recipe, source)
    lineage = prepared.lineage
    target = lineage.target
    shards = shards_of(target.tensors, parse_bytes(recipe.shard_size))
    files = [shard.bytes for shard in shards]
    read, written = total_bytes(source.tensors), sum(files)
    most = _largest_share(files, ranks)
    warnings = list(prepared.warnings)
    if recipe.optimizer is not None:
        warnings.append(
            f"the disk does not count what the optimizer's state, {recipe.optimizer}, becomes; "
            "growkit run --dry-run reads it, and does"
        )
    if ranks > len(files):
        warnings.append(
            f"{ranks} ranks share {counted(len(files), 'file')}, so that some have none; choose a "
            "smaller shard_size, or fewer ranks"
        )
    return LargePlan(
        source=recipe.source,
        output=recipe.output,
        promise=lineage.promise,
        lost=lineage.lost or None,
        source_parameters=total_parameters(source.tensors),
        parameters=total_parameters(target.tensors),
        dtype=TORCH_NAMES[main_dtype(target.tensors)],
        ranks=ranks,
        bandwidth=limit,
        read=read,
        disk_needed=disk_needed(target, beside),
        files=len(files),
        largest_file=max(files),
        largest_share=most,
        memory=memory_needed(source, target, recipe.verify),
        write_seconds=round(seconds_to_write(most, read + written, limit), 1),
        proof_seconds=proof_seconds(
            source, target, recipe.verify, exact=lineage.promise == "exact"
        ),
        basis=BASIS,
        warnings=warnings,
    )


def _largest_share(files: list[int], ranks: int) -> int:
    """Bytes of the rank that writes most, where each file goes to the one with least so far."""
    shares = [0] * ranks
    heapify(shares)
    for size in sorted(files, reverse=True):
        heapreplace(shares, shares[0] + size)
    return max(shares)
