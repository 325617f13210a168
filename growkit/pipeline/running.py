"""Execute a recipe: open, plan, write, prove, publish.

Data flows one way: headers of the source → a plan for each step → tensors streamed into shards in
a temporary folder → the proof on the written files → the output's name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from growkit.base.errors import InputError, called, renamed
from growkit.base.lazy import usual_torch
from growkit.base.options import options_of, takes
from growkit.base.progress import Progress, Silent, current, shown
from growkit.base.settings import Running, Settings, settings_of
from growkit.base.tensors import Config, total_bytes
from growkit.base.units import given_date
from growkit.engine.prompts import read_text
from growkit.engine.recipe_planning import plan_recipe, planned_result, planned_tensors
from growkit.engine.transformers_class import resolved
from growkit.engine.written_config import config_to_write
from growkit.model.checkpoint import publishing, writing
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import Output, formats, read_config
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import check_faults, report_faults
from growkit.model.families.family import known_family
from growkit.pipeline.costs import disk_needed, estimate
from growkit.planning import recipe as recipes
from growkit.planning.companions import Opened, companions
from growkit.planning.manifest import manifest_of
from growkit.planning.plan import Lineage
from growkit.planning.recipe import Recipe, load_description, load_recipe, recipe_file
from growkit.planning.updates import Law, law_of, recorded_law, summary
from growkit.proof.preflight import check_settings, preflight
from growkit.report.saving import inherited, model_card
from growkit.results.growth_result import GrowResult
from growkit.results.proof_result import RankCost, VerifyResult, name_result
from growkit.sources import family_for, find, open_both


@takes(Recipe, Running)
def grow(
    source: str | Path,
    output: str | Path,
    *,
    method: str = recipes.DEFAULT_METHOD,
    seed: int = 0,
    family: str | Path | Mapping[str, Any] | None = None,
    verify: Settings | bool = True,
    progress: Progress = Silent(),
    **options: Any,
) -> GrowResult:
    """Grow a checkpoint into a larger one that computes the same function.

    Args:
        source: model folder; or a model on the Hub, ``hf://ORG/NAME@REVISION``, or ``ORG/NAME``
            where there is no folder ``ORG``.
        output: folder to make.
        method: name of a growth method.
        seed: seed of the random splits.
        family: description of the source's family: a YAML file, or its contents. None for that of
            growkit, which is inferred from the model's class if growkit has none.
        verify: settings of the proof; True for the default settings, False for no proof.
        progress: receives the progress.
        **options: what the output is written like (``growkit.Recipe``: ``dtype``, ``shard_size``,
            ``base_model``, ``optimizer``, ``adapter``, ``format``); ``overwrite``, ``proof_only``
            and ``dry_run`` (see ``run``); the method's sizes, e.g. ``hidden="x2"`` or
            ``hidden=2048``, and its other options. Methods that copy take ``symmetry``
            (``"break"`` splits weights at random so that copies diverge in training, ``"keep"``
            makes plain copies) and ``snr_db`` (the signal-to-noise ratio of the random splits in
            dB, at least 4.78).

    Returns:
        The result. ``kept`` is False if the promise was broken; the output is then called
        ``OUT.rejected``.

    Raises:
        InputError: the source, a size or the output cannot be used; nothing was written.
    """
    reads = [family] if isinstance(family, str | Path) else []
    more = {"seed": seed, "family": load_description(family)}
    step = recipes.GrowStep, method
    return _one_step(*step, source, output, verify, progress, options, more, reads)


@takes(Recipe, Running)
def convert(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    verify: Settings | bool = True,
    progress: Progress = Silent(),
    **options: Any,
) -> GrowResult:
    """Turn a checkpoint into another attention variant, or store it in another layout.

    Args:
        source: model folder, or one on the Hub; see ``grow``, also for the result and the errors.
        output: folder to make.
        to: name of the variant or layout.
        verify: see ``grow``.
        progress: see ``grow``.
        **options: see ``grow``; and the conversion's options, e.g. ``gamma="gated"``.
    """
    return _one_step(recipes.ConvertStep, to, source, output, verify, progress, options)


@takes(Recipe, Running)
def shrink(
    source: str | Path,
    output: str | Path,
    *,
    method: str | None = None,
    verify: Settings | bool = True,
    progress: Progress = Silent(),
    **options: Any,
) -> GrowResult:
    """Make a checkpoint smaller, such as a grown one what it was before.

    Args:
        source: model folder, or one on the Hub; see ``grow``, also for the result and the errors.
        output: folder to make.
        method: name of a method of shrinking; None for the one that has the options, or ``undo``.
        verify: see ``grow``.
        progress: see ``grow``.
        **options: see ``grow``; and the method's options.
    """
    method = method or recipes.method_for(options)
    return _one_step(recipes.ShrinkStep, method, source, output, verify, progress, options)


def _one_step(
    kind: type[recipes.Step],
    name: str,
    source: str | Path,
    output: str | Path,
    verify: Settings | bool,
    progress: Progress,
    options: dict[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
    reads: Sequence[str | Path] = (),
) -> GrowResult:
    """Run a recipe of one step; ``options`` are those of recipe, run and step."""
    of_recipe, of_run = (_taken(options, declared) for declared in (Recipe, Running))
    step = kind(name, options)
    recipe = Recipe(str(source), (step,), str(output), settings_of(verify), **of_recipe, **more)
    return run(recipe, reads=reads, progress=progress, **of_run)


def _taken(options: dict[str, Any], kind: type) -> dict[str, Any]:
    """Remove the options that a dataclass declares, and return them."""
    return {name: options.pop(name) for name in options_of(kind) if name in options}


@report_faults()
@usual_torch()
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
    """Execute a recipe: all its steps in one pass, without an intermediate checkpoint.

    Args:
        recipe: the recipe, its file, a model made by a recipe, or the name of a recipe that ships
            with growkit.
        verify: settings of the proof, instead of the recipe's own; see ``grow``.
        reads: files that the run reads and the recipe does not name; they are never replaced.
        overwrite: replace an output that growkit wrote.
        proof_only: delete the weights once the promise is kept, and keep the other files. They
            prove the recipe, with which ``growkit.load`` makes the weights from the source again.
        dry_run: plan only, write nothing.
        progress: receives the progress.

    Returns:
        See ``grow``, also for the errors.
    """
    if isinstance(recipe, str | Path):
        file = recipe_file(Path(recipe))
        reads, recipe = [*reads, file], load_recipe(file)
    if verify is not None:
        recipe = replace(recipe, verify=settings_of(verify))
    if proof_only and recipe.verify is None:
        raise InputError(
            "nothing but the proof is to be kept, and it is switched off; leave out --proof-only, "
            "or --no-verify (in Python verify=False, in a recipe verify: false)"
        )
    with shown(progress):
        return _Run(recipe, reads, dry_run).execute(overwrite, proof_only)


class _Run:
    """The run of a recipe on its source: check, plan, write, prove and publish.

    Args:
        recipe: the recipe.
        reads: see ``run``.
        dry_run: see ``run``.
    """

    def __init__(self, recipe: Recipe, reads: Sequence[str | Path], dry_run: bool) -> None:
        given_date()  # like all checks below, reports an error before anything that takes time
        self.dry_run = dry_run
        self.output, self.origin = recipe.output_path, find(recipe.source)
        self.inputs = replace(recipe, source=str(self.origin.folder)).inputs(reads)
        family = family_for(self.origin, recipe.family)
        types = family.model_types if family else ()
        if recipe.verify is not None and any(known_family({"model_type": kind}) for kind in types):
            raise InputError(
                f"the family describes model_type {types[0]!r}, for which growkit has "
                "one of its own, and the proof uses that; leave out the family, or the proof"
            )
        self.source = self.origin.open(family)
        if self.origin.by_address:
            base_model = recipe.base_model or self.origin.base_model
            recipe = replace(recipe, source=self.origin.name, base_model=base_model)
        self.recipe = replace(recipe, family=family.description if family else None)
        self.other_files = [*recipe.texts, *reads]

    def execute(self, overwrite: bool, proof_only: bool) -> GrowResult:
        """Execute the recipe; see ``grow``."""
        recipe, source = self.recipe, self.source
        replaceable = publishing.check_output(self.output, self.inputs, overwrite, self.dry_run)
        writing.parse_bytes(recipe.shard_size)
        for text in recipe.texts:
            read_text(text)
        if recipe.verify is not None:
            check_settings(recipe.verify, source, adapter=recipe.adapter is not None)
        source.opened.check_carried()
        self._plan()
        self.lineage.check_values()
        if self.dry_run:
            return self._estimated(overwrite)
        if recipe.verify is not None:
            preflight(recipe.verify, source, self.target)
        with (
            publishing.staged(self.output, replaceable) as staging,
            called(staging.folder, str(self.output), f"{self.output}/"),
            writing.hashing() as hashes,
        ):
            publishing.check_space(staging.folder, disk_needed(self.target, self.extra))
            # They import torch, which takes a second that must not count as writing.
            from growkit.engine.device import check_subnormal_numbers

            check_subnormal_numbers()
            self._write(staging.folder, hashes)
            self._prove_and_describe(staging.folder, hashes, proof_only)
            check_faults()
            self.result["output"] = str(staging.publish(rejected=self.result["kept"] is False))
        return self.result

    def _plan(self) -> None:
        """Plan all steps from headers."""
        recipe, source = self.recipe, self.source
        self.prepared = plan_recipe(recipe, source)
        self.lineage = self.prepared.lineage
        self.target = self.lineage.target
        self.recipe = replace(recipe, steps=self.prepared.steps)
        self.result = result = planned_result(self.recipe, source, self.prepared)
        result["dropped"] |= source.left_out
        result["warnings"][:0] = [source.note] if source.note else []
        result["warnings"] += source.notes + ([self.origin.warning] if self.origin.warning else [])
        self.tokenizer = self._tokenizer_to_write()
        try:
            self.metadata = inherited(source.opened)
        except InputError as error:
            self.metadata = {}
            result["warnings"].append(str(error))
        self.of_source = self._law_of_source()
        self.companions: dict[str, Opened] = {}
        for companion in companions():
            if path := companion.path(recipe):
                opened = companion.open(path, source, self.lineage, recipe.output)
                self.companions[companion.key] = opened
                self.other_files += opened.files
                result["warnings"] += opened.warnings
                result[companion.key] = opened.result()
        self.files = self._planned_files()
        self.extra = source.opened.carried_bytes()
        self.extra += sum(companion.bytes for companion in self.companions.values())

    def _planned_files(self) -> Output:
        """Plan the files with the weights.

        Raises:
            InputError: another program's format does not hold the model, or a setting of it.
        """
        config, shard_bytes = self.target.config, writing.parse_bytes(self.recipe.shard_size)
        file_format = self.recipe.file_format
        if file_format is None:
            own = next(one for one in formats() if one.in_recipes == self.recipe.format)
            return own.output(self.target, config, self.source.opened, shard_bytes)
        config = resolved(config) or config
        files = file_format.output(self.target, config, self.source.opened, shard_bytes)
        file_format.check_held(files, self.source, self.lineage)
        self.result["bytes"] = total_bytes(files.tensors.tensors)
        self.result["warnings"] += files.warnings
        return files

    def _tokenizer_to_write(self) -> dict[str, Any]:
        """The files that the target's tokenizer needs; see ``tokenizer_to_write``."""
        config, source = self.target.family.named(self.target.config), self.source.opened
        if config["model_type"] == read_config(source).get("model_type"):
            return {}
        from growkit.proof.sidecars import SETTINGS, TOKENIZER, tokenizer_to_write  # imports torch

        files = tokenizer_to_write(source, config)
        if files:
            before = source.json(SETTINGS) if source.has(SETTINGS) else {}
            new = [f"{key} {of!r}" for key, of in files[SETTINGS].items() if before.get(key) != of]
            rules = f", and {TOKENIZER} the rules of that class" if TOKENIZER in files else ""
            self.result["warnings"].append(
                f"{SETTINGS} will have {', '.join(new)}{rules}, with which transformers loads the "
                f"source's tokenizer; with model_type {config['model_type']!r}, it would load "
                "another one"
            )
        return files

    def _law_of_source(self) -> Law | None:
        """The law of updates of a source that growkit made; None if it begins here."""
        opened, warnings = self.source.opened, self.result["warnings"]
        if not opened.has(publishing.MANIFEST):
            return None
        try:
            law = recorded_law(opened, self.source.tensors)
        except InputError as error:
            warnings.append(
                f"param_groups will take the learning rate of {self.source.where()} itself, since "
                f"{error}"
            )
            return None
        of_target = law_of(self.lineage, law).updates
        if any(update.rate != 1 or update.eps != 1 for update in of_target.values()):
            warnings.append(
                f"{self.source.where()} was grown itself, so param_groups will take the learning "
                f"rate of the model that it was grown from; to give it that of "
                f"{self.source.where()}, remove its {publishing.MANIFEST} before you grow it"
            )
        return law

    def _estimated(self, overwrite: bool) -> GrowResult:
        """Make the result of a dry run: the plan, and an estimate of the run."""
        proof, result, lineage = self.recipe.verify, self.result, self.lineage
        if proof and proof != Settings():  # default settings cannot be refused
            preflight(proof, self.source, self.target)
        result["dry_run"], result["plan"] = True, planned_tensors(self.source, lineage)
        if os.path.lexists(self.output) and not overwrite:
            result["warnings"].append(
                f"{self.output} exists, so a run needs --overwrite or another name"
            )
        headers, exact = (self.source, self.target), lineage.promise == "exact"
        expected = estimate(headers, self.output, proof, self.extra, exact=exact)
        result["estimate"] = expected
        if expected["disk_free"] < expected["disk_needed"]:
            result["warnings"].append("the disk has no room for the output, so a run is refused")
        return result

    def _write(self, folder: Path, hashes: writing.Hashes) -> None:
        """Write the weights, their config, carried files, the optimizer's state and the adapter."""
        from growkit.proof.sidecars import write_generation

        source, result = self.source, self.result
        started = time.perf_counter()
        with (
            current().bytes("writing", result["bytes"]) as advance,
            publishing.writing(self.output),
        ):
            files = self.files
            writing.write_shards(files.tensors, folder, files.shards, advance, hashes)
            for name, content in files.files.items():
                (folder / name).write_bytes(content)
            if not (self.recipe.file_format and self.recipe.file_format.self_contained):
                source.opened.carry_over(folder)
                _write_config(source, self.lineage, files.config, folder)
                for name, content in self.tokenizer.items():
                    publishing.write_json(folder / name, content)
                if not self.lineage.write_sidecars(Folder(folder)):
                    write_generation(source.opened, Folder(folder))
        result["write_seconds"] = round(time.perf_counter() - started, 3)

        law = law_of(self.lineage)
        result["updates"] = summary(law_of(self.lineage, self.of_source), self.target.tensors)
        for name, companion in self.companions.items():
            with publishing.writing(self.output):
                result[name] = companion.write(folder, law, hashes)

    def _prove_and_describe(self, folder: Path, hashes: writing.Hashes, proof_only: bool) -> None:
        """Prove the written files; then write the model card and, last, the manifest."""
        source, result = self.source, self.result
        every = (file for file in folder.rglob("*") if file.is_file())
        written = {file.relative_to(folder).as_posix(): file for file in every}
        hashes.add(*written.values(), flushed=True)
        # Hash inputs only now: writing keeps every core and the disk busy.
        hashed, texts = source.model_files, {str(file): Path(file) for file in self.other_files}
        hashes.add(*hashed.values(), *texts.values())
        result["verification"] = verdict = self._prove(folder)
        result["kept"] = verdict["kept"] if verdict else None
        manifest = manifest_of(self.recipe, result, source, hashes.of(hashed), hashes.of(texts))
        with publishing.writing(self.output):
            digests = hashes.of(written)
            if proof_only and result["kept"]:
                manifest["not_kept"] = _remove_weights(folder, digests)
            tokenizer, eager = "tokenizer_config.json" in written, self.prepared.eager_experts
            card = model_card(manifest, self.metadata, tokenizer=tokenizer, eager_experts=eager)
            (folder / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
            publishing.write_manifest(folder, manifest, digests)
        copied = [source.folder / name for name in source.opened.carried()]
        self.inputs.check_unchanged([*hashed.values(), *texts.values(), *copied])

    def _prove(self, folder: Path) -> VerifyResult | None:
        """Prove the written files; None without a proof."""
        recipe = self.recipe
        if recipe.verify is None:
            return None
        from growkit.proof.pair import Request
        from growkit.proof.verdict import prove

        source, written = open_both(self.origin, find(folder))
        state, adapter = (
            Path(path) if path else None for path in (recipe.optimizer, recipe.adapter)
        )
        request = Request(source, written, recipe.verify, recipe, state, adapter)
        verdict = prove(request)
        costs = self.prepared.kl_by_rank.items()
        verdict.sections.weights.kl_by_rank = [
            RankCost(rank=n, kl_nats_per_token=kl) for n, kl in costs
        ]
        # A rejected output goes to OUT.rejected.
        target = recipe.output if verdict["kept"] else str(publishing.rejected_name(self.output))
        _rename(verdict, folder, target)
        return name_result(verdict, self.origin.name, target)


def _rename(origin: Any, folder: Path, name: str) -> None:
    """Give a temporary folder its published name in all texts of a result."""
    for key, value in origin.items() if isinstance(origin, dict) else enumerate(origin):
        if isinstance(value, dict | list):
            _rename(value, folder, name)
        elif isinstance(value, str):
            origin[key] = renamed(value, folder, name, f"{name}/")


def _write_config(source: Checkpoint, lineage: Lineage, added: Config, folder: Path) -> None:
    """Write the config and the keys added to it, and the code of a model without a class."""
    planned, family = lineage.target.config, lineage.target.family
    publishing.write_json(folder / "config.json", added | config_to_write(lineage))
    code, named = family.code(), planned.get("auto_map")
    for name, content in code.items():
        (folder / name).write_bytes(content)
    if not code and named and named == source.config.get("auto_map"):
        for name in {*source.opened.code()}.difference(source.opened.carried()):
            source.opened.copy(name, folder)


def _remove_weights(folder: Path, digests: Mapping[str, str]) -> dict[str, list[Any]]:
    """Delete the weights of a proved folder, and the optimizer's state with them.

    Returns:
        Size in bytes and SHA-256 of every deleted file, by name.
    """
    checkpoint = Checkpoint(folder)
    paths = {file.relative_to(folder).as_posix() for file in checkpoint.files}
    paths |= {*checkpoint.opened.names("*.index.json")}
    for companion in companions():
        paths |= {*checkpoint.opened.names(*companion.outputs())} if companion.large else set()
    removed: dict[str, list[Any]] = {}
    for name in sorted(paths):
        removed[name] = [(folder / name).stat().st_size, digests[name]]
        (folder / name).unlink()
    return removed
