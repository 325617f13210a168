"""Whether a folder is what its manifest recorded: on any later day, wherever it was copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, reason
from growkit.base.progress import Advance, Progress, Silent
from growkit.base.units import size
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.made import MANIFEST, own_hash
from growkit.results.check import CheckResult, Difference, difference


def check(folder: str | Path, *, progress: Progress = Silent()) -> CheckResult:
    """Hold a folder that growkit wrote against its manifest: the size and SHA-256 of every file.

    It needs nothing but the folder, so it works on another machine and on a copy.

    Args:
        folder: an output of growkit.
        progress: where progress is shown.

    Returns:
        Whether the folder is whole, and otherwise every difference.

    Raises:
        InputError: there is no folder, or its manifest cannot be used.
    """
    opened = Folder(folder)
    if not opened.has(MANIFEST):
        raise InputError(
            f"{opened} holds no {MANIFEST}, so there is nothing to hold it against; "
            "give a folder that growkit wrote"
        )
    manifest = opened.json(MANIFEST)
    recorded = _recorded(manifest, opened.path / MANIFEST)
    there = [name for name in opened.names() if name != MANIFEST]
    found = [difference(name, "missing") for name in sorted({*recorded} - {*there})]
    if not own_hash(manifest):
        found.append(difference(MANIFEST, "changed", "it has another SHA-256 than it says"))
    total = sum(count for name, (count, _) in recorded.items() if name in there)
    with progress.bytes("checking", total) as advance:
        for name in there:
            if name in recorded:
                found += _differences(opened, name, *recorded[name], advance)
            else:
                found.append(difference(name, "extra"))
    created = manifest.get("created")
    return CheckResult(
        folder=str(folder),
        whole=not found,
        reason=_reason(len(found), recorded),
        files=len(recorded),
        bytes=sum(count for count, _ in recorded.values()),
        created=created if isinstance(created, str) else None,
        differences=sorted(found, key=lambda each: each.file),
    )


def _recorded(manifest: Mapping[str, Any], file: Path) -> dict[str, tuple[int, str]]:
    """The size and SHA-256 of every file, as a manifest gives them."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise InputError(f"{file} does not list the files of its folder; copy it again")
    recorded = {}
    for name, entry in files.items():
        match entry:
            case [int(count), str(digest)]:
                recorded[name] = count, digest
            case [int(), int()]:
                raise InputError(
                    f"{file} is of an early growkit, which recorded times in place of hashes; "
                    "make the model again to have them"
                )
            case _:
                raise InputError(
                    f"{file} gives no size and SHA-256 for {name!r} in 'files'; copy it again"
                )
    return recorded


def _differences(
    folder: Folder, name: str, count: int, digest: str, advance: Advance
) -> list[Difference]:
    """What became of a file that is there; nothing if it is as it was."""
    try:
        file = folder.require(name)
        bytes_now = file.stat().st_size
        if bytes_now != count:
            advance(count)
            return [difference(name, "changed", sizes=(count, bytes_now))]
        now = sha256(file, advance=advance)
    except (InputError, OSError) as error:
        return [difference(name, "unreadable", reason(error))]
    return [] if now == digest else [difference(name, "changed", hashes=(digest, now))]


def _reason(differences: int, recorded: Mapping[str, tuple[int, str]]) -> str:
    total = size(sum(count for count, _ in recorded.values()))
    held = f"{len(recorded)} file{'s' * (len(recorded) != 1)}, {total}"
    if not differences:
        return f"intact: {held}, all as {MANIFEST} recorded them"
    several = "differences" if differences > 1 else "difference"
    return f"not intact: {differences} {several} from what {MANIFEST} recorded ({held})"
