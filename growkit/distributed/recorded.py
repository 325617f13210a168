"""Whether a model that is made while it loads is the one whose proof a manifest holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from growkit.base.errors import InputError
from growkit.checkpoint.folder import read_json
from growkit.checkpoint.model_files import GENERATION
from growkit.checkpoint.publishing import own_hash
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.writing import sha256

T = TypeVar("T")


def check_recorded(manifest: Path, source: Checkpoint, *, together: bool = False) -> None:
    """Hold a source against the manifest of what was made of it.

    Args:
        manifest: the file.
        source: what is read.
        together: whether all processes that torchrun has started do this. Those on one machine,
            which read the same files, then share these out.

    Raises:
        InputError: a file is not the recorded one, the model broke its promise, or somebody has
            changed the manifest.
    """
    content = read_json(manifest)
    if "growkit" not in content:
        return  # a recipe of its own
    if content.get("kept") is False:
        raise InputError(
            f"the model of {manifest} did not keep its promise, so that nobody should load it; "
            "see what verification says there"
        )
    if not own_hash(content):
        raise InputError(
            f"{manifest} is not as growkit wrote it, so that what it makes need not be what was "
            "proved; copy it again, or give a recipe without a proof"
        )
    recorded = content.get("source_files")
    known = dict(recorded) if isinstance(recorded, dict) else {}
    files = _hashes(source)
    made = _made(content)
    if made is None:
        files = [each for each in files if each[0] != GENERATION]
    elif GENERATION in made:
        known[GENERATION] = made[GENERATION]  # as it was copied from the source
    for name in known.keys() & {GENERATION} - {name for name, _ in files}:
        raise InputError(
            f"{source.where()} has no {name}, and {manifest} was made from a model that had one; "
            "give that file, or a recipe without a proof"
        )
    for name, digest in _share(files) if together else files:
        if known.get(name) != digest():
            raise InputError(
                f"{source.where()}/{name} is not the file that {manifest} was made from, so its "
                "proof says nothing of it; give that file, or a recipe without a proof"
            )


def _made(manifest: Mapping[str, Any]) -> dict[str, str] | None:
    """The SHA-256 of the files of what was made; None in early manifests, which do not say it."""
    files = manifest.get("files")
    pairs = files.items() if isinstance(files, dict) else ()
    found = {name: of[1] for name, of in pairs if isinstance(of, list) and len(of) == 2}
    return found if any(isinstance(each, str) for each in found.values()) else None


def _hashes(source: Checkpoint) -> list[tuple[str, Callable[[], str]]]:
    beside = [source.folder / name for name in (GENERATION,) if source.opened.has(name)]
    files = [source.folder / "config.json", *beside, *source.files]
    return [(file.relative_to(source.folder).as_posix(), partial(sha256, file)) for file in files]


def _share(files: Sequence[T]) -> Sequence[T]:
    """Those of this process among the ones that torchrun has started on this machine."""
    rank, size = (os.environ.get(f"LOCAL_{name}", "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return files
    return files[int(rank) :: int(size)]
