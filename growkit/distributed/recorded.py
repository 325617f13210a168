"""Whether a model that is made while it loads is the one whose proof a manifest holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.made import own_hash
from growkit.checkpoint.reading import Checkpoint, read_json
from growkit.checkpoint.remote import RemoteWeights
from growkit.errors import InputError

T = TypeVar("T")


def check_recorded(
    manifest: Path, source: Checkpoint | RemoteWeights, *, together: bool = False
) -> None:
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
    known: Mapping[str, Any] = recorded if isinstance(recorded, dict) else {}
    files = source.hashes() if isinstance(source, RemoteWeights) else _hashes(source)
    for name, digest in _share(files) if together else files:
        if known.get(name) != digest():
            raise InputError(
                f"{source.where()}/{name} is not the file that {manifest} was made from, so its "
                "proof says nothing of it; give that file, or a recipe without a proof"
            )


def _hashes(source: Checkpoint) -> list[tuple[str, Callable[[], str]]]:
    files = [source.folder / "config.json", *source.files]
    return [(file.relative_to(source.folder).as_posix(), partial(sha256, file)) for file in files]


def _share(files: Sequence[T]) -> Sequence[T]:
    """Those of this process among the ones that torchrun has started on this machine."""
    rank, size = (os.environ.get(f"LOCAL_{name}", "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return files
    return files[int(rank) :: int(size)]
