"""What else makes a model what it is: its config, its tokenizer, and the code beside its weights.

No prompt shows a window that is longer than it, the tokens of the proof are the source's, and the
proof runs growkit's own class, not the code in a folder. So all of these are compared with what
growkit writes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from growkit.checkpoint import Config
from growkit.checkpoint.reading import Checkpoint
from growkit.families import family_of
from growkit.proof.companions import first_changed_companion

FREE = frozenset({"use_cache", "transformers_version", "_name_or_path"})
"""Keys that change nothing of what a model computes."""


def first_changed_file(target: Checkpoint, planned: Config, source: Checkpoint) -> str | None:
    """What is not as it was made.

    Args:
        target: the folder that was written.
        planned: the config that its recipe plans.
        source: the folder that the files beside the weights come from.

    Returns:
        ``KEY in config.json`` or the name of a file that was changed or is missing; None if all is
        as it was.
    """
    family = family_of(planned, str(target.folder))
    wanted = family.named(planned)
    missing: Any = object()
    for key in sorted((wanted.keys() | target.config.keys()) - FREE):
        if wanted.get(key, missing) != target.config.get(key, missing):
            return f"{key} in config.json"
    with tempfile.TemporaryDirectory(prefix="growkit-code-") as scratch:
        code = Path(scratch)
        if family.write_code:
            family.write_code(code)
        elif wanted.get("auto_map") and wanted["auto_map"] == source.config.get("auto_map"):
            code = source.folder
        for file in sorted(code.glob("*.py")):
            written = target.folder / file.name
            if not written.is_file() or written.read_bytes() != file.read_bytes():
                return file.name
    return first_changed_companion(source.folder, target.folder)
