"""What killed runs have left: it is named, and deleted if growkit made it and nobody uses it."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path

from growkit.base.errors import plain
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.publishing import tidy
from growkit.checkpoint.scratch import ENDING, MODE, NAMES, dead

_log = getLogger("growkit")


def sweep(outputs: Iterable[Path], inputs: Inputs) -> None:
    """Look for leftovers beside outputs and among temporary files; say what was done with each.

    Args:
        outputs: beside which to look.
        inputs: files that must not be deleted.
    """
    outputs = [*outputs]
    places = dict.fromkeys([*(path.parent for path in outputs), Path(tempfile.gettempdir())])
    for place in places:
        for folder in _candidates(place):
            if inputs.among(folder) is not None:
                continue
            with suppress(OSError), dead(folder) as is_dead:
                if is_dead:
                    _remove(folder)
                elif _barely_made(folder, outputs):
                    folder.rmdir()


def _candidates(place: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            found = re.fullmatch(NAMES, entry.name) and entry.is_dir(follow_symlinks=False)
            if found and (not hasattr(os, "geteuid") or entry.stat().st_uid == os.geteuid()):
                yield Path(entry.path)


def _barely_made(folder: Path, outputs: Sequence[Path]) -> bool:
    """Whether a run of one of these outputs was killed before it could lock its folder."""
    stem = folder.name[:-ENDING]
    named = stem.startswith("growkit-") or stem in {f".{path.name}." for path in outputs}
    ours = stat.S_IMODE(folder.stat().st_mode) == MODE
    return named and ours and not any(folder.iterdir())


def _remove(folder: Path) -> None:
    stays = tidy(folder)
    if stays:
        said = f"{stays[0]} is left of a killed run; keep what you need of it, and delete it"
    elif os.path.lexists(folder):
        said = f"{folder} is left of a killed run and cannot be deleted; do so"
    else:
        said = f"deleted {folder}, which was left of a killed run"
    _log.warning("%s", plain(said))
