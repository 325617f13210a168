"""Small files that are written at once: whoever looks sees what was there before, or all of it."""

from __future__ import annotations

import os
from pathlib import Path

from growkit.checkpoint.exchange import move
from growkit.checkpoint.flushing import flush
from growkit.checkpoint.publishing import writing
from growkit.checkpoint.scratch import Scratch


def write_whole(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file.

    Args:
        path: its name; if there is another file of this name, it is replaced.
        text: what it shall hold; names that are no Unicode are escaped.
        new: whether the name must be free.

    Raises:
        InputError: it cannot be written, or the name is not free; names it.
    """
    scratch = Scratch(path.with_name(f".{path.name}."))
    try:
        with writing(path):
            scratch.make()
            written = scratch.path / path.name
            written.write_bytes(text.encode("utf-8", "backslashreplace"))
            flush(written)
            if new:
                move(written, path)
            else:
                os.replace(written, path)
            flush(path.parent)
    finally:
        scratch.close()
