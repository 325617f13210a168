"""Manifests: records of how a folder was made, with functions to write, read and check them.

An existing manifest is not trusted. Its recipe is planned again to derive the expected weights;
nothing else in it is used as evidence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growkit.base import __version__
from growkit.base.errors import InputError, foreign, reason
from growkit.base.names import by_name, name_of, without_paths
from growkit.base.progress import Advance, Progress, Silent
from growkit.base.units import given_date, size, today
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.publishing import MANIFEST, own_hash, read_manifest
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.writing import sha256
from growkit.planning.recipe import Recipe, parse_recipe, with_paths
from growkit.results import versions
from growkit.results.growth_result import CheckResult, Difference, GrowResult
from growkit.results.proof_result import counted

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
    source_files: Mapping[str, str],
    other_files: Mapping[str, str],
) -> dict[str, Any]:
    """Make the manifest of a new model; it holds no path, so it can be published.

    Args:
        recipe: the recipe of the model.
        result: the result of the run.
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


def read_record(target: Checkpoint) -> Recipe | None:
    """Read the recipe in the manifest of a folder; None if there is no manifest.

    Raises:
        InputError: the manifest is damaged, or has no recipe.
    """
    if not target.opened.has(MANIFEST):
        return None
    file = target.folder / MANIFEST
    recipe = target.opened.json(MANIFEST).get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{file} holds no recipe; remove the file to compare logits alone")
    with foreign(f"the recipe in {file} cannot be read", "remove the file to compare without it"):
        return parse_recipe(recipe, str(file))  # untrusted values may raise anything


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


def check(folder: str | Path, *, progress: Progress = Silent()) -> CheckResult:
    """Compare a folder with its manifest: the size and SHA-256 of every file.

    Only the folder is needed, so the check works on another machine and on a copy.

    Args:
        folder: an output of growkit.
        progress: receives the progress.

    Returns:
        Whether the folder is whole, with every difference.

    Raises:
        InputError: there is no folder, or its manifest cannot be used.
    """
    opened = Folder(folder)
    manifest = read_manifest(opened)
    recorded = _recorded(manifest, opened.path / MANIFEST)
    there = dict.fromkeys(name for name in opened.names() if name != MANIFEST)
    differences = [
        Difference(file=name, what="missing") for name in sorted(recorded.keys() - there.keys())
    ]
    if not own_hash(manifest):
        differences.append(Difference(file=MANIFEST, what="changed", why="its own SHA-256 differs"))
    total = sum(count for name, (count, _) in recorded.items() if name in there)
    with progress.bytes("checking", total) as advance:
        for name in there:
            if name in recorded:
                differences += _differences(opened, name, *recorded[name], advance)
            else:
                differences.append(Difference(file=name, what="extra"))
    written = sum(count for count, _ in recorded.values())
    files = f"{counted(len(recorded), 'file')}, {size(written)}"
    why = f"intact: {files}, all as {MANIFEST} recorded them"
    if differences:
        several = counted(len(differences), "difference")
        why = f"not intact: {several} from what {MANIFEST} recorded ({files})"
    created = manifest.get("created")
    return CheckResult(
        folder=str(folder),
        whole=not differences,
        reason=why,
        files=len(recorded),
        bytes=written,
        created=created if isinstance(created, str) else None,
        differences=sorted(differences, key=lambda difference: difference.file),
    )


def _recorded(manifest: Mapping[str, Any], file: Path) -> dict[str, tuple[int, str]]:
    """Read the size and SHA-256 of every file from a manifest."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise InputError(f"{file} does not list the files of its folder; copy it again")
    recorded = {}
    for name, entry in files.items():
        match entry:
            case [int(count), str(digest)]:
                recorded[name] = count, digest
            case _:
                raise InputError(
                    f"{file} gives no size and SHA-256 for {name!r} in 'files'; copy it again"
                )
    return recorded


def _differences(
    folder: Folder, name: str, count: int, digest: str, advance: Advance
) -> list[Difference]:
    """Compare a file with its record; empty if they agree."""
    difference = Difference(file=name, what="changed")
    try:
        file = folder.require(name)
        if file.stat().st_size != count:
            advance(count)
            difference.recorded_bytes, difference.found_bytes = count, file.stat().st_size
            return [difference]
        now = sha256(file, advance=advance)
    except (InputError, OSError) as error:
        return [Difference(file=name, what="unreadable", why=reason(error))]
    difference.recorded_sha256, difference.found_sha256 = digest, now
    return [] if now == digest else [difference]
