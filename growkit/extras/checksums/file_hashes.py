"""Comparison of a folder with its manifest: the size and SHA-256 of every file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, reason
from growkit.base.progress import Advance, Progress, Silent
from growkit.base.units import size
from growkit.extras.checksums.results.check_result import CheckResult, Difference
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import MANIFEST, own_hash, read_manifest
from growkit.model.checkpoint.writing import sha256
from growkit.results.proof_result import counted


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
