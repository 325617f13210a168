"""The whole story of an operation: open, plan, stream, prove, publish.

Data flows one way: headers of the source → a plan per step → tensors streamed into shards in a
temporary folder → the proof on the written files → the output's name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from growkit.checkpoint.carrying import carried, carried_bytes, carry_over, check_carried
from growkit.checkpoint.hashing import hashing
from growkit.checkpoint.journal import journal
from growkit.checkpoint.leftovers import sweep
from growkit.checkpoint.publishing import check_output, check_space, rejected_name, staged, writing
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.writing import parse_bytes
from growkit.companions import without_weights, write_config, write_documents
from growkit.dates import given
from growkit.engine.inside import Inside
from growkit.engine.texts import read_text
from growkit.errors import InputError
from growkit.estimate import disk_needed, estimate
from growkit.families.added import knowing, stranger
from growkit.manifest import manifest_of
from growkit.planner import Prepared, describe, plan, planned_tensors, trained
from growkit.planning.lineage import Lineage
from growkit.proof.beforehand import check_settings, rehearse
from growkit.proof.sizes import bytes_of
from growkit.ranks import ALONE, Ranks
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.places import inputs_of, output_path
from growkit.recipe.recipe import Recipe
from growkit.report.progress import Progress, Silent, shown
from growkit.results.operation import GrowResult
from growkit.results.proof import RankCost, VerifyResult
from growkit.settings import Settings, settings_of
from growkit.sharing import OutputWeights, files_of
from growkit.sources.source import Source, find, pair

if TYPE_CHECKING:
    from growkit.optimizer.optimizer import Optimizer


def run(
    recipe: Recipe | str | Path,
    *,
    verify: Settings | bool | None = None,
    reads: Sequence[str | Path] = (),
    overwrite: bool = False,
    resume: bool = False,
    proof_only: bool = False,
    dry_run: bool = False,
    ranks: Ranks = ALONE,
    progress: Progress = Silent(),
) -> GrowResult:
    """Carry out a recipe: all its steps as one pass, without an intermediate checkpoint.

    Args:
        recipe: the recipe; or its file, a model that one has made, or the name of a recipe that
            ships with growkit.
        verify: what the proof compares, in the place of what the recipe says; see ``grow``.
        reads: files that are read beside those that the recipe names, and so are never replaced.
        overwrite: see ``grow``, as for the rest, the result and the errors.
        resume: see there.
        proof_only: see there.
        dry_run: plan only, touch nothing.
        ranks: processes that write together, of which this one leads; this one alone without.
        progress: where progress is shown.
    """
    if isinstance(recipe, str | Path):
        file = recipe_file(Path(recipe))
        reads, recipe = [*reads, file], load_recipe(file)
    if verify is not None:
        recipe = replace(recipe, verify=settings_of(verify))
    _check_family(recipe)
    with knowing(recipe.family):
        return _carried_out(
            recipe,
            reads,
            progress,
            ranks,
            overwrite=overwrite,
            resume=resume,
            proof_only=proof_only,
            dry_run=dry_run,
        )


def _carried_out(
    recipe: Recipe,
    reads: Sequence[str | Path],
    progress: Progress,
    ranks: Ranks,
    *,
    overwrite: bool,
    resume: bool,
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
        sweep([output], inputs, output if resume else None)
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

    rehearse(recipe.verify, source, lineage.target)
    hashed = files_of(source)
    states = optimizer.files if optimizer else ()
    texts = {str(file): Path(file) for file in (*recipe.texts, *reads, *states)}
    weights = OutputWeights(recipe, source, lineage)
    unchanged = partial(inputs.check_unchanged, [*hashed.values()])
    with (
        staged(output, replaceable, keep=resume) as staging,
        journal(staging.folder.parent, ranks.rank, unchanged) as kept,
    ):
        kept.begin(hashed, weights.plan)
        there = weights.resumed(output, staging.folder, kept, progress) if resume else {}
        needed = disk_needed(lineage.target, _beside(source, result))
        check_space(staging.folder, needed - sum(there.values()))
        import_module("torch")  # takes a second, which is none of writing
        started = time.perf_counter()
        with progress.bytes("writing", result["bytes"]) as advance, writing(output):
            of_others = weights.write(staging.folder, there, kept, ranks, advance)
            carry_over(source.opened, staging.folder)
            write_config(source, lineage.target, staging.folder)
        result["write_seconds"] = round(time.perf_counter() - started, 3)
        law, result["updates"] = trained(lineage)
        with writing(output):
            result["optimizer"] = optimizer and optimizer.write(staging.folder, law, progress)

        every = (file for file in staging.folder.rglob("*") if file.is_file())
        made = {file.relative_to(staging.folder).as_posix(): file for file in every}
        beside_weights = {name: made[name] for name in made.keys() - weights.names}
        # Not while the weights are written, which keeps every core and the disk busy.
        with hashing(beside_weights, flushed=True) as written, hashing(texts) as more:
            result["verification"] = _prove(
                recipe, found, staging.folder, progress, prepared, ranks
            )
            ranks.let_go()
            if result["verification"]:
                result["kept"] = result["verification"]["kept"]
            manifest = manifest_of(recipe, result, kept.hashes(), more.result())
            with writing(output):
                finished = {**of_others, **kept.finished()}
                digests = {name: shard.sha256 for name, shard in finished.items()}
                digests |= written.result()
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
        rehearse(recipe.verify, source, lineage.target)
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


def _prove(
    recipe: Recipe,
    found: Source,
    folder: Path,
    progress: Progress,
    prepared: Prepared,
    ranks: Ranks,
) -> VerifyResult | None:
    """The verdict on the written files."""
    if recipe.verify is None:
        return None
    from growkit.proof.verdict import prove

    source, written = pair(found, find(folder))
    with progress.bytes("proving", bytes_of(source, written)) as advance:
        state = Path(recipe.optimizer) if recipe.optimizer else None
        verdict = prove(source, written, recipe.verify, recipe, advance, state, ranks)
    verdict["kl_by_rank"] = [
        RankCost(rank=rank, kl_nats_per_token=cost) for rank, cost in prepared.kl_by_rank.items()
    ]
    # What broke its promise lies beside the name that was asked for.
    rejected = str(rejected_name(output_path(recipe)))
    verdict["source"] = found.name
    verdict["target"] = recipe.output if verdict["kept"] else rejected
    return verdict
