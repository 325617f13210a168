"""The whole story of an operation: open, plan, stream, prove, publish.

Data flows one way: headers of the source → a plan per step → tensors streamed into shards in a
temporary folder → the proof on the written files → the output's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.checkpoint.carrying import carried, carry_code, carry_over, check_carried
from growkit.checkpoint.folder import MOST_ENTRIES
from growkit.checkpoint.hashing import hashing
from growkit.checkpoint.inputs import Inputs, below
from growkit.checkpoint.leftovers import sweep
from growkit.checkpoint.made import write_json, write_manifest
from growkit.checkpoint.publishing import check_output, check_space, staged, writing
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Weights
from growkit.checkpoint.writing import parse_bytes, write_weights
from growkit.engine.texts import read_text
from growkit.estimate import ROOM, estimate
from growkit.families.added import knowing
from growkit.families.described import load_description
from growkit.families.family import family_of
from growkit.manifest import manifest_of
from growkit.planner import Prepared, describe, plan, planned_tensors
from growkit.planning.lineage import Lineage
from growkit.planning.operation import Value
from growkit.proof.beforehand import check_settings
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.recipe import DEFAULT_SHARD_SIZE, Recipe
from growkit.recipe.steps import ConvertStep, GrowStep
from growkit.report.card import model_card
from growkit.report.progress import Progress, Silent, shown
from growkit.results.operation import GrowResult
from growkit.results.proof import RankCost, VerifyResult
from growkit.results.updates import Updates
from growkit.settings import Settings

if TYPE_CHECKING:
    from growkit.optimizer.optimizer import Optimizer
    from growkit.planning.updates import Law


def grow(
    source: str | Path,
    output: str | Path,
    *,
    method: str = "hypercloning",
    seed: int = 0,
    dtype: str | None = None,
    shard_size: str = DEFAULT_SHARD_SIZE,
    base_model: str | None = None,
    family: str | Path | Mapping[str, Any] | None = None,
    optimizer: str | Path | None = None,
    verify: Settings | bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = Silent(),
    **options: Value | None,
) -> GrowResult:
    """Grow a checkpoint into a larger one that computes the same function.

    Args:
        source: model folder.
        output: folder to make.
        method: name of a growth method.
        seed: of the random splits.
        dtype: torch name of a wider dtype for the output; None for the source's.
        shard_size: upper limit of one output file, e.g. ``5GB``.
        base_model: what the model card calls the source, ``ORG/NAME`` on the Hub; None for nothing.
        family: describes the source's family, for one that growkit does not know: a YAML file, or
            what stands in it (``growkit.infer`` proposes one).
        optimizer: the state of the source's optimizer, which is grown and written beside the
            weights in the same format: an ``optimizer.pt`` or a checkpoint folder of Trainer with
            it, a folder of torch.distributed.checkpoint or a Universal Checkpoint of DeepSpeed.
        verify: what the proof compares; True for the default settings, False for no proof.
        overwrite: replace an output that growkit wrote.
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
    written = dtype, shard_size, base_model, _description(family), _path(optimizer)
    recipe = Recipe(str(source), (step,), str(output), _settings(verify), seed, *written)
    return run(
        recipe, reads=_files(family), overwrite=overwrite, dry_run=dry_run, progress=progress
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
    verify: Settings | bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = Silent(),
    **options: Value | None,
) -> GrowResult:
    """Turn a checkpoint into another attention variant, or store it in another layout.

    Args:
        source: model folder.
        output: folder to make.
        to: name of the variant or layout.
        dtype: see ``grow``, as for the rest, the result and the errors.
        shard_size: see there.
        base_model: see there.
        optimizer: see there.
        verify: see there.
        overwrite: see there.
        dry_run: see there.
        progress: see there.
        **options: the conversion's options, e.g. ``gamma="gated"``.
    """
    step = ConvertStep(to, _given(options))
    written = dtype, shard_size, base_model, None, _path(optimizer)
    recipe = Recipe(str(source), (step,), str(output), _settings(verify), 0, *written)
    return run(recipe, overwrite=overwrite, dry_run=dry_run, progress=progress)


def run(
    recipe: Recipe | str | Path,
    *,
    verify: Settings | bool | None = None,
    reads: Sequence[str | Path] = (),
    overwrite: bool = False,
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
        dry_run: plan only, touch nothing.
        progress: where progress is shown.
    """
    if isinstance(recipe, str | Path):
        file = recipe_file(Path(recipe))
        reads, recipe = [*reads, file], load_recipe(file)
    if verify is not None:
        recipe = replace(recipe, verify=_settings(verify))
    with knowing(recipe.family):
        return _carried_out(recipe, reads, progress, overwrite=overwrite, dry_run=dry_run)


def _carried_out(
    recipe: Recipe,
    reads: Sequence[str | Path],
    progress: Progress,
    *,
    overwrite: bool,
    dry_run: bool,
) -> GrowResult:
    """See ``run``; the source's family is known."""
    output = output_path(recipe)
    inputs = inputs_of(recipe, reads)
    if not dry_run:
        sweep([output], inputs)
    source = Checkpoint(recipe.source)
    replaceable = check_output(output, inputs, overwrite)
    shard_bytes = parse_bytes(recipe.shard_size)
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
    optimizer = _optimizer(recipe, source, lineage)
    result["optimizer"] = optimizer and optimizer.result()
    if dry_run:
        if recipe.verify != Settings():  # else nothing was asked for that could be refused
            _rehearse(recipe, source, lineage.target)
        result["dry_run"], result["plan"] = True, planned_tensors(source, lineage)
        exact = lineage.promise == "exact"
        expected = estimate(source, lineage.target, output, recipe.verify, exact=exact)
        result["estimate"] = expected
        if expected["disk_free"] < expected["disk_needed"]:
            result["warnings"].append("the disk has no room for the output, so a run is refused")
        return result

    _rehearse(recipe, source, lineage.target)
    hashed = {file.relative_to(source.folder).as_posix(): file for file in source.files}
    hashed["config.json"] = source.folder / "config.json"
    texts = {str(file): Path(file) for file in (*recipe.texts, *reads, *_state_files(optimizer))}
    with staged(output, replaceable) as staging:
        check_space(staging.folder, _room(result))
        import_module("torch")  # takes a second, which is none of writing
        started = time.perf_counter()
        with progress.bytes("writing", result["bytes"]) as advance, writing(output):
            write_weights(lineage.target, staging.folder, shard_bytes, advance)
            carry_over(source.opened, staging.folder)
            _write_config(source, lineage.target, staging.folder)
        result["write_seconds"] = round(time.perf_counter() - started, 3)
        law, result["updates"] = _updates(lineage)
        with writing(output):
            result["optimizer"] = optimizer and optimizer.write(staging.folder, law, progress)

        every = (file for file in staging.folder.rglob("*") if file.is_file())
        made = {file.relative_to(staging.folder).as_posix(): file for file in every}
        # Not while the weights are written, which keeps every core and the disk busy.
        with (
            hashing(made, flushed=True) as written,
            hashing(hashed) as hashes,
            hashing(texts) as more,
        ):
            result["verification"] = _prove(recipe, staging.folder, progress, prepared)
            if result["verification"]:
                result["kept"] = result["verification"]["kept"]
            manifest = manifest_of(recipe, result, hashes.result(), more.result())
            with writing(output):
                _document(manifest, written.result(), staging.folder)
        beside = [source.folder / name for name in carried(source.opened)]
        inputs.check_unchanged([*hashed.values(), *texts.values(), *beside])
        final = staging.reject if result["kept"] is False else staging.publish
        result["output"] = str(final())
    return result


def _settings(verify: Settings | bool | None) -> Settings | None:
    """What the proof compares; None for no proof."""
    return Settings() if verify is True else verify or None


def _description(family: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What stands in the file."""
    return load_description(family) if isinstance(family, str | Path) else family


def _files(family: object) -> list[str | Path]:
    return [family] if isinstance(family, str | Path) else []


def _path(optimizer: str | Path | None) -> str | None:
    return str(optimizer) if optimizer else None


def _given(options: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in options.items() if value is not None}


def output_path(recipe: Recipe) -> Path:
    """Where the output goes, absolute: the name must lead there also when OUT itself is moved."""
    output = Path(recipe.output)
    if ".." in output.parts:  # which leads elsewhere behind a link
        output = Path(os.path.realpath(output.parent)) / output.name
    return Path(os.path.abspath(output))


def inputs_of(recipe: Recipe, reads: Sequence[str | Path] = ()) -> Inputs:
    """Everything that a recipe reads, and its own file or the like."""
    states = [Path(recipe.optimizer)] if recipe.optimizer else []
    inside = [each for path in states for each in islice(below(path), MOST_ENTRIES)]
    return Inputs([recipe.source, *recipe.texts, *reads, *states, *inside])


def _optimizer(recipe: Recipe, source: Checkpoint, lineage: Lineage) -> Optimizer | None:
    """What is taken along beside the weights; None if there is nothing."""
    if recipe.optimizer is None:
        return None
    from growkit.optimizer.optimizer import Optimizer

    return Optimizer(Path(recipe.optimizer), source, lineage)


def _state_files(optimizer: Optimizer | None) -> tuple[Path, ...]:
    """What is read of an optimizer."""
    return optimizer.files if optimizer else ()


def _room(result: GrowResult) -> int:
    """Bytes that the output takes, at most about."""
    state = result["optimizer"]
    return int(result["bytes"] + (state["bytes"] if state else 0) + ROOM)


def _updates(lineage: Lineage) -> tuple[Law, Updates]:
    """How the output is to be trained."""
    from growkit.planning.factors import summary
    from growkit.planning.updates import law_of

    law = law_of(lineage)
    return law, summary(law, lineage.target.tensors)


def _write_config(source: Checkpoint, grown: Weights, folder: Path) -> None:
    """Write the config, and the model's code beside it where transformers has no class for it."""
    family = family_of(grown.config, str(folder))
    write_json(folder / "config.json", family.named(grown.config))
    if family.write_code:
        family.write_code(folder)
    elif grown.config.get("auto_map") and grown.config["auto_map"] == source.config.get("auto_map"):
        carry_code(source.opened, folder)


def _rehearse(recipe: Recipe, source: Checkpoint, grown: Weights) -> None:
    """Find out what the proof would refuse, before anything is written."""
    if recipe.verify is not None:
        from growkit.proof.verdict import rehearse

        rehearse(recipe.verify, source, grown)


def _prove(
    recipe: Recipe, folder: Path, progress: Progress, prepared: Prepared
) -> VerifyResult | None:
    """The verdict on the written files."""
    if recipe.verify is None:
        return None
    from growkit.proof.verdict import proof_bytes, prove

    source, written = Checkpoint(recipe.source), Checkpoint(folder)
    with progress.bytes("proving", proof_bytes(recipe.source, folder)) as advance:
        state = Path(recipe.optimizer) if recipe.optimizer else None
        verdict = prove(source, written, recipe.verify, recipe, advance, state)
    verdict["kl_by_rank"] = [
        RankCost(rank=rank, kl_nats_per_token=cost) for rank, cost in prepared.kl_by_rank.items()
    ]
    verdict["target"] = recipe.output
    return verdict


def _document(manifest: Mapping[str, Any], hashes: Mapping[str, str], folder: Path) -> None:
    """Write the model card and, last of all, the manifest."""
    card = model_card(manifest, tokenizer=(folder / "tokenizer_config.json").is_file())
    (folder / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
    write_manifest(folder, manifest, hashes)
