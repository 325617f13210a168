"""What growkit made: every file of an output is recorded in its manifest, with its SHA-256.

Only what is as it was recorded is ever replaced or deleted, one recorded name after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.inputs import State, below, state_of
from growkit.checkpoint.reading import read_json

MANIFEST = "growkit.json"

Contents = dict[str, State]
"""The state of everything in a folder, by its path in it."""


def write_json(file: Path, content: Any) -> None:
    """Write JSON; names that are no Unicode are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    file.write_bytes(text.encode("utf-8", "backslashreplace"))


def write_manifest(folder: Path, manifest: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Write the manifest of a folder in which everything else is written.

    Args:
        folder: the folder.
        manifest: what it says beside ``files`` (size in bytes and SHA-256 of every other file) and
            ``sha256`` (of itself, as it would be without this key).
        known: the SHA-256 of some of the files.
    """
    files = {
        name: [size, known.get(name) or sha256(folder / name)]
        for name, (_, _, mode, size, *_) in sorted(contents(folder).items())
        if not stat.S_ISDIR(mode)
    }
    complete = {**manifest, "files": files}
    write_json(folder / MANIFEST, {**complete, "sha256": _hash(complete)})


def contents(folder: Path) -> Contents:
    """Everything in a folder; links are not followed.

    Raises:
        OSError: some of it cannot be listed.
    """
    found = below(folder, onerror=_refuse)
    return {path.relative_to(folder).as_posix(): state_of(path.lstat()) for path in found}


def _refuse(error: OSError) -> None:
    raise error


def made_around(path: Path) -> Path | None:
    """The model that growkit wrote in whose folder something lies, or would lie.

    A manifest alone makes no model: people keep one as the recipe that it is, among other files.
    """
    parents = Path(os.path.realpath(path)).parents
    parts = MANIFEST, "config.json"
    found = (each for each in parents if all(os.path.lexists(each / part) for part in parts))
    return next(found, None)


def is_untouched(folder: Path, *, partly: bool = False) -> bool:
    """Whether a folder holds nothing but what growkit wrote, as it wrote it; or nothing at all.

    Args:
        folder: the folder; a link to one is none.
        partly: whether some of it may be missing.

    Raises:
        InputError: the manifest cannot be read.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    if not os.path.lexists(folder / MANIFEST):
        return not any(folder.iterdir())
    manifest = read_json(folder / MANIFEST)
    recorded = manifest.get("files")
    if not isinstance(recorded, dict) or not own_hash(manifest):
        return False
    found = contents(folder)
    folders = {str(parent) for name in recorded for parent in Path(name).parents}
    device = folder.lstat().st_dev
    for name, (where, _, mode, *_) in found.items():
        expected = name in folders if stat.S_ISDIR(mode) else name in {*recorded, MANIFEST}
        if not expected or where != device or stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR):
            return False
    files = [name for name in recorded if name in found]
    return (partly or len(files) == len(recorded)) and all(
        _unchanged(folder / name, found[name], recorded[name]) for name in files
    )


def _unchanged(file: Path, found: State, recorded: Any) -> bool:
    if not isinstance(recorded, list) or len(recorded) != 2 or found[3] != recorded[0]:
        return False
    if isinstance(recorded[1], int):  # early manifests name the time of the last change
        return found[4] == recorded[1]
    return bool(sha256(file) == recorded[1])


def own_hash(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is as it was written; early ones, without any hash, do not tell."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    if "sha256" in manifest:
        return bool(manifest["sha256"] == _hash(rest))
    files = manifest.get("files")
    return not isinstance(files, dict) or not any(map(_has_hash, files.values()))


def _has_hash(recorded: Any) -> bool:
    """Whether a manifest gives the hash of a file, not the time of its last change."""
    return isinstance(recorded, list) and any(isinstance(each, str) for each in recorded)


def _hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def remove(folder: Path) -> None:
    """Delete a folder that is untouched, at least in part; see ``is_untouched``.

    The manifest goes last, so that a removal that was interrupted can be taken up again.

    Raises:
        OSError: something cannot be deleted, or is not growkit's.
    """
    if os.path.lexists(folder / MANIFEST):
        recorded = read_json(folder / MANIFEST)["files"]
        found = contents(folder)
        for name, (_, _, mode, *_) in found.items():
            if name in recorded and not stat.S_ISDIR(mode):
                (folder / name).unlink()
        for name in sorted((n for n in found if stat.S_ISDIR(found[n][2])), reverse=True):
            with suppress(OSError):
                (folder / name).rmdir()
        if [path.name for path in folder.iterdir()] == [MANIFEST]:
            (folder / MANIFEST).unlink()
    folder.rmdir()
