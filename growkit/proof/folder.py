"""What else makes a model what it is: its config, its tokenizer, and the code beside its weights.

No prompt shows a window that is longer than it, the tokens of the proof are the source's, and the
proof runs growkit's own class, not the code in a folder. So all of these are compared with what
growkit writes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from growkit.checkpoint import Config
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import temporary
from growkit.families import family_of
from growkit.modeling import register
from growkit.proof.companions import first_changed_companion
from growkit.proof.oracle import quiet

FREE = frozenset({"use_cache", "transformers_version", "_name_or_path"})
"""Keys that change nothing of what a model computes."""

RENAMED = frozenset({"torch_dtype"})
"""Keys of earlier versions of transformers, which it still reads."""


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
    key = _first_changed_key(wanted, target.config)
    if key is not None:
        return f"{key} in config.json"
    with temporary("code") as code:
        if family.write_code:
            family.write_code(code)
        elif wanted.get("auto_map") and wanted["auto_map"] == source.config.get("auto_map"):
            code = source.folder
        for file in sorted(code.glob("*.py")):
            written = target.folder / file.name
            if not written.is_file() or written.read_bytes() != file.read_bytes():
                return file.name
    return first_changed_companion(source.folder, target.folder)


def _first_changed_key(wanted: Config, found: Config) -> str | None:
    """The first key that has another value, once both configs say what they leave out.

    A key that the class derives from others stands in neither, and is not to blame.
    """
    written = (wanted.keys() | found.keys()) - FREE
    first, second = _complete(wanted), _complete(found)
    if first is None or second is None:
        first, second = wanted, found
    # What the class passes over, such as a second rope_theta, another engine may read.
    added = found.keys() - wanted.keys() - second.keys() - RENAMED
    second |= {key: found[key] for key in added if found[key] is not None}
    missing: Any = object()
    keys = sorted((first.keys() | second.keys()) - FREE, key=lambda key: (key not in written, key))
    return next((k for k in keys if first.get(k, missing) != second.get(k, missing)), None)


def _complete(config: Config) -> Config | None:
    """A config with the defaults of its class; None where transformers knows none, or refuses it.

    Null is a value: a window of null is none, and one that is left out has the default length.
    """
    from transformers import AutoConfig

    register()
    # The class writes into what it is given.
    named = deepcopy({key: value for key, value in config.items() if key != "auto_map"})
    with quiet():
        try:
            complete: Config = AutoConfig.for_model(**named).to_dict()
        except Exception:  # a config that does not fit may raise anything
            return None
    return complete | {key: config[key] for key in ("auto_map",) if key in config}
