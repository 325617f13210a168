"""Manifests: records of how a folder was made, with functions to write, read and check them.

An existing manifest is not trusted. Its recipe is planned again to derive the expected weights;
nothing else in it is used as evidence.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from growkit.base import __version__
from growkit.base.errors import InputError, foreign
from growkit.base.names import by_name, name_of, without_paths
from growkit.base.tensors import main_dtype
from growkit.base.units import given_date, today
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.writing import sha256
from growkit.model.model import Model
from growkit.planning.operation import SizeOption
from growkit.planning.recipe import Recipe, ShrinkStep, Step, parse_recipe, with_paths
from growkit.results import versions
from growkit.results.growth_result import GrowResult

FORMAT = 2
"""Version of the manifest: from 2 on, a recipe with random splits gives the same bits for ever."""

COPIED = (
    *("promise", "lost", "kept", "source_parameters", "parameters", "bytes", "dtype", "rounded"),
    *("loads_with", "warnings", "copies", "dropped", "updates"),
    *("optimizer", "adapter", "verification"),
)
"""Fields of a result that its manifest repeats."""


def manifest_of(
    recipe: Recipe,
    result: GrowResult,
    source: Model,
    source_files: Mapping[str, str],
    other_files: Mapping[str, str],
) -> dict[str, Any]:
    """Make the manifest of a new model; it holds no path, so it can be published.

    Args:
        recipe: the recipe of the model.
        result: the result of the run.
        source: the source, of which the manifest repeats the config and the dtypes.
        source_files: the SHA-256 of each file of the source, by its path in the source.
        other_files: the SHA-256 of each other file that was read, by its path.
    """
    proof = result["verification"]
    read = {key: proof[key] for key in ("source", "target", "text") if proof[key]} if proof else {}
    public = without_paths([recipe.source, recipe.output, *read.values()])
    manifest = {
        "growkit": __version__,
        "format": FORMAT,
        "versions": versions(),
        "created": today(),
        "recipe": with_paths(recipe.as_dict(), name_of),
        "papers": [f"{step.name}: {step.operation.paper}" for step in recipe.steps],
        "source_model": _headers(source),
        "source_files": dict(source_files),
        "other_files": by_name(other_files),
        **{key: result[key] for key in COPIED},
    }
    manifest["warnings"] = public(result["warnings"])
    for key in ("optimizer", "adapter"):
        if result[key]:
            manifest[key] = {**result[key], "path": name_of(result[key]["path"])}
    if proof:
        named = {key: name_of(path) for key, path in read.items()}
        seconds = None if given_date() else proof["seconds"]
        manifest["verification"] = {**public(proof), **named, "seconds": seconds}
    return manifest


def _headers(source: Model) -> dict[str, Any]:
    """What the headers of a source say, in short: its config, and the dtypes of its tensors."""
    main = main_dtype(source.tensors)
    others = {name: info.dtype for name, info in source.tensors.items() if info.dtype != main}
    return {"config": source.config, "dtype": main, "other_dtypes": others}


def read_record(target: Folder) -> Recipe | None:
    """Read the recipe in the manifest of a folder; None if there is no manifest.

    Raises:
        InputError: the manifest is damaged, or has no recipe.
    """
    if not target.has(MANIFEST):
        return None
    file = target.path / MANIFEST
    recipe = target.json(MANIFEST).get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{file} holds no recipe; remove the file to compare logits alone")
    # Untrusted values may raise anything.
    with foreign(f"the recipe in {file} cannot be read", "remove the file to compare without it"):
        try:
            return parse_recipe(recipe, str(file), recorded=True)
        except InputError as error:  # an option of an earlier version, for example
            raise InputError(f"{error}; remove {file} to compare without it") from error


NO_FILE = os.path.join(os.devnull, "not read")
"""A path without a file, in place of a text in a manifest."""


def without_searches(recipe: Recipe, after: Model) -> Recipe:
    """The recipe of a manifest, without what could make its plan read files or take long.

    Args:
        recipe: the recipe, which is not trusted.
        after: the model that it made.

    Raises:
        InputError: it lacks the result of a search, or has a size that no tensor has.
    """
    steps = tuple(_without_search(step) for step in recipe.steps)
    _check_sizes(steps, after)
    return replace(recipe, steps=steps)


def _without_search(step: Step) -> Step:
    """Make a step that reads no file.

    Raises:
        InputError: the step lacks the result of its search.
    """
    options = dict(step.options)
    searched = {*step.files} & options.keys() - {"calibration"}
    if options.keys().isdisjoint(("shrinkage", "pairs")):  # what is searched for on a text
        searched |= {"calibration"} & options.keys()
    if searched or options.get("rank") == "auto":
        raise InputError("it lacks the result of a search")
    if "calibration" in options:
        options["calibration"] = NO_FILE
    return type(step)(step.name, options)


def _check_sizes(steps: tuple[Step, ...], after: Model) -> None:
    """Refuse sizes that no tensor of the target has, before anything of such a size is made.

    The number of layers is at most the number of tensors.
    """
    widest = max((max(info.shape, default=1) for info in after.tensors.values()), default=1)
    limit = max(widest, len(after.tensors))
    for at, step in enumerate(steps):
        if any(isinstance(later, ShrinkStep) for later in steps[at + 1 :]):
            continue  # the target may be smaller than what the step makes
        for option in (
            option for option in step.operation.options if isinstance(option, SizeOption)
        ):
            size = str(step.options.get(option.name, "")).removeprefix("x")
            for digits in size.partition(".")[0].split("/"):
                if len(digits) > len(str(limit)) or (digits.isdigit() and int(digits) > limit):
                    raise InputError(f"no tensor of the target is of size {digits[:20]}")


def changed_since(target: Checkpoint, names: Sequence[str]) -> list[str]:
    """List files of a folder that differ from its manifest; empty without a manifest."""
    if not target.opened.has(MANIFEST):
        return []
    recorded = target.opened.json(MANIFEST).get("files")
    known = recorded if isinstance(recorded, dict) else {}
    return [
        name
        for name in names
        if known.get(name)
        != [target.opened.require(name).stat().st_size, sha256(target.folder / name)]
    ]
