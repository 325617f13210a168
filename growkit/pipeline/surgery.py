"""The whole story of an operation: open, plan, stream, prove, publish.

Data flows one way: headers of the source → a plan per step → tensors streamed into shards in a
temporary folder → the proof on the written files → the output's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from growkit.base.dates import given
from growkit.base.errors import InputError
from growkit.base.progress import Progress, Silent, shown
from growkit.base.settings import Settings, settings_of
from growkit.checkpoint.carrying import carried, carried_bytes, carry_over, check_carried
from growkit.checkpoint.distributed_writing import distributed_shards, write_list
from growkit.checkpoint.hashing import Hashes, hashing
from growkit.checkpoint.leftovers import sweep
from growkit.checkpoint.publishing import check_output, check_space, rejected_name, staged, writing
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.sources.source import Source, find, pair
from growkit.checkpoint.writing import Shard, parse_bytes, shards_of, write_index, write_shards
from growkit.engine.class_weights import class_names
from growkit.engine.inside import Inside
from growkit.engine.texts import read_text
from growkit.families.added import stranger, temporary_family
from growkit.families.family import family_of
from growkit.pipeline.companions import without_weights, write_config, write_documents
from growkit.pipeline.estimate import disk_needed, estimate
from growkit.planning.lineage import Lineage
from growkit.proof.beforehand import check_settings, preflight
from growkit.proof.sizes import bytes_of
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.manifest import manifest_of
from growkit.recipe.places import inputs_of, output_path
from growkit.recipe.planner import Prepared, describe, plan, planned_tensors, trained
from growkit.recipe.recipe import Recipe
from growkit.results.operation import GrowResult
from growkit.results.proof import RankCost, VerifyResult

if TYPE_CHECKING:
    from growkit.optimizer.optimizer import Optimizer


def run(
    recipe: Recipe | str | Path,
    *,
    verify: Settings | bool | None = None,
    reads: Sequence[str | Path] = (),
    overwrite: bool = False,
    proof_only: bool = False,
    dry_run: bool = False,
    progress: Progress = Silent(),
) -> GrowResult:
    """Carry out a recipe: all its steps as one pass, without an intermediate checkpoint.

    Args:
        recipe: the recipe; or its file, a model that one has made, or the name of a recipe that
            ships with growkit.
        verify: what the proof compares, in the place of what the recipe says; see ``grow``.
        reads: files that are read beside those that the recipe names, and so are never replaced.
        overwrite: see ``grow``, as for the rest, the result and the errors.
        proof_only: see there.
        dry_run: plan only, touch nothing.
        progress: where progress is shown.
    """
    if isinstance(recipe, str | Path):
        file = recipe_file(Path(recipe))
        reads, recipe = [*reads, file], load_recipe(file)
    if verify is not None:
        recipe = replace(recipe, verify=settings_of(verify))
    _check_family(recipe)
    with temporary_family(recipe.family):
        return _execute(
            recipe,
            reads,
            progress,
            overwrite=overwrite,
            proof_only=proof_only,
            dry_run=dry_run,
        )


def _execute(
    recipe: Recipe,
    reads: Sequence[str | Path],
    progress: Progress,
    *,
    overwrite: bool,
    proof_only: bool,
    dry_run: bool,
) -> GrowResult:
    """See ``run``; the source's family is known."""
    given()  # before anything that takes time
    if proof_only and recipe.verify is None:
        raise InputError(
            "nothing but the proof is to be kept, and it is switched off; leave out --proof-only, "
            "or --no-verify (in Python verify=False, in a recipe verify: false)"
        )
    output = output_path(recipe)
    found = find(recipe.source)
    inputs = inputs_of(replace(recipe, source=str(found.folder)), reads)
    if not dry_run:
        sweep([output], inputs)
    source = found.open()
    if found.by_address:
        base_model = recipe.base_model or found.base_model
        recipe = replace(recipe, source=found.name, base_model=base_model)
    replaceable = check_output(output, inputs, overwrite)
    parse_bytes(recipe.shard_size)  # before anything that takes time
    for text in recipe.texts:
        read_text(text)  # also a dry run says that it is missing
    if recipe.verify is not None:
        check_settings(recipe.verify, source)

    check_carried(source.opened)

    with shown(progress):
        prepared = plan(recipe, source)
    lineage = prepared.lineage
    recipe = replace(recipe, steps=prepared.steps)
    result = describe(recipe, source, prepared)
    if isinstance(source, Inside):
        result["dropped"] |= source.dropped
        result["warnings"].insert(0, source.told())
    result["warnings"] += [found.warning] if found.warning else []
    optimizer = _optimizer(recipe, source, lineage)
    result["optimizer"] = optimizer and optimizer.result()
    if dry_run:
        return _foreseen(recipe, source, lineage, output, result)

    preflight(recipe.verify, source, lineage.target)
    hashed = source.model_files
    states = optimizer.files if optimizer else ()
    texts = {str(file): Path(file) for file in (*recipe.texts, *reads, *states)}
    with staged(output, replaceable) as staging, hashing() as hashes:
        check_space(staging.folder, disk_needed(lineage.target, _beside(source, result)))
        import_module("torch")  # takes a second, which is none of writing
        started = time.perf_counter()
        with progress.bytes("writing", result["bytes"]) as advance, writing(output):
            _write_weights(recipe, lineage, staging.folder, advance, hashes)
            carry_over(source.opened, staging.folder)
            write_config(source, lineage.target, staging.folder)
        result["write_seconds"] = round(time.perf_counter() - started, 3)
        law, result["updates"] = trained(lineage)
        with writing(output):
            result["optimizer"] = optimizer and optimizer.write(staging.folder, law, progress)

        every = (file for file in staging.folder.rglob("*") if file.is_file())
        made = {file.relative_to(staging.folder).as_posix(): file for file in every}
        hashes.add(*made.values(), flushed=True)
        # Not while the weights are written, which keeps every core and the disk busy.
        hashes.add(*hashed.values(), *texts.values())
        result["verification"] = _prove(recipe, found, staging.folder, progress, prepared)
        if result["verification"]:
            result["kept"] = result["verification"]["kept"]
        manifest = manifest_of(recipe, result, hashes.of(hashed), hashes.of(texts))
        with writing(output):
            digests = hashes.of(made)
            if proof_only and result["kept"]:
                manifest["not_kept"] = without_weights(staging.folder, digests)
            write_documents(manifest, digests, staging.folder)
        beside = [source.folder / name for name in carried(source.opened)]
        inputs.check_unchanged([*hashed.values(), *texts.values(), *beside])
        final = staging.reject if result["kept"] is False else staging.publish
        result["output"] = str(final())
    return result


def _check_family(recipe: Recipe) -> None:
    """Refuse to describe what the proof knows by itself."""
    if recipe.verify is not None and recipe.family and not stranger(recipe.family):
        raise InputError(
            f"the family describes model_type {recipe.family['model_type']!r}, for which growkit "
            "has one of its own, and the proof uses that; leave out the family, or the proof"
        )


def _foreseen(
    recipe: Recipe, source: Checkpoint, lineage: Lineage, output: Path, result: GrowResult
) -> GrowResult:
    """The result of a dry run: what would be done, and what that would take."""
    if recipe.verify != Settings():  # else nothing was asked for that could be refused
        preflight(recipe.verify, source, lineage.target)
    result["dry_run"], result["plan"] = True, planned_tensors(source, lineage)
    exact = lineage.promise == "exact"
    beside = _beside(source, result)
    expected = estimate(source, lineage.target, output, recipe.verify, beside, exact=exact)
    result["estimate"] = expected
    if expected["disk_free"] < expected["disk_needed"]:
        result["warnings"].append("the disk has no room for the output, so a run is refused")
    return result


def _beside(source: Checkpoint, result: GrowResult) -> int:
    """Bytes of what goes along with the weights."""
    state = result["optimizer"]
    return carried_bytes(source.opened) + (state["bytes"] if state else 0)


def _optimizer(recipe: Recipe, source: Checkpoint, lineage: Lineage) -> Optimizer | None:
    """What is taken along beside the weights; None if there is nothing."""
    if recipe.optimizer is None:
        return None
    from growkit.optimizer.optimizer import Optimizer

    optimizer = Optimizer(Path(recipe.optimizer), source, lineage)
    optimizer.check_schedules()  # before anything that takes time
    return optimizer


def _write_weights(
    recipe: Recipe,
    lineage: Lineage,
    folder: Path,
    advance: Callable[[int], None],
    hashes: Hashes,
) -> None:
    """Write every shard, and the index or list that names them."""
    target, limit = lineage.target, parse_bytes(recipe.shard_size)

    def finished(shard: Shard) -> None:
        hashes.add(folder / shard.name, flushed=True)

    if recipe.format == "dcp":
        family = family_of(target.config, recipe.output)
        of_class = class_names(target, dict(family.named(target.config)))
        distributed = distributed_shards(target.tensors, limit)
        write_shards(target, folder, distributed, advance, finished)
        write_list(distributed, folder, of_class)
    else:
        shards = shards_of(target.tensors, limit)
        write_shards(target, folder, shards, advance, finished)
        write_index(shards, folder)


def _prove(
    recipe: Recipe,
    found: Source,
    folder: Path,
    progress: Progress,
    prepared: Prepared,
) -> VerifyResult | None:
    """The verdict on the written files."""
    if recipe.verify is None:
        return None
    from growkit.proof.verdict import prove
    from growkit.results.advice import name_result

    source, written = pair(found, find(folder))
    with progress.bytes("proving", bytes_of(source, written)) as advance:
        state = Path(recipe.optimizer) if recipe.optimizer else None
        verdict = prove(source, written, recipe.verify, recipe, advance, state)
    verdict["kl_by_rank"] = [
        RankCost(rank=rank, kl_nats_per_token=cost) for rank, cost in prepared.kl_by_rank.items()
    ]
    # A rejected output goes to OUT.rejected.
    rejected = str(rejected_name(output_path(recipe)))
    return name_result(verdict, found.name, recipe.output if verdict["kept"] else rejected)
