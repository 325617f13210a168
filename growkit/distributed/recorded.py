"""Whether a model that is made while it loads is the one whose proof a manifest holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.reading import Checkpoint, read_json
from growkit.checkpoint.remote import RemoteWeights
from growkit.errors import InputError


def check_recorded(manifest: Path, source: Checkpoint | RemoteWeights) -> None:
    """Hold a source against the manifest of what was made of it.

    Processes that torchrun has started share the files out.

    Raises:
        InputError: a file is not the recorded one, or the model broke its promise.
    """
    content = read_json(manifest)
    if "growkit" not in content:
        return  # a recipe of its own
    if content.get("kept") is False:
        raise InputError(
            f"the model of {manifest} did not keep its promise, so that nobody should load it; "
            "see what verification says there"
        )
    recorded = content.get("source_files")
    known: Mapping[str, Any] = recorded if isinstance(recorded, dict) else {}
    files = source.hashes() if isinstance(source, RemoteWeights) else _hashes(source)
    for name, digest in files[_number("RANK", 0) :: _number("WORLD_SIZE", 1)]:
        if known.get(name) != digest():
            raise InputError(
                f"{source.where()}/{name} is not the file that {manifest} was made from, so its "
                "proof says nothing of it; give that file, or a recipe without a proof"
            )


def _hashes(source: Checkpoint) -> list[tuple[str, Callable[[], str]]]:
    files = [source.folder / "config.json", *source.files]
    return [(file.relative_to(source.folder).as_posix(), partial(sha256, file)) for file in files]


def _number(name: str, otherwise: int) -> int:
    """What torchrun says."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise
