"""Code beside the weights, which transformers runs when it is told to trust it; growkit never does.

What is proved is the class that transformers or growkit has. So code in a folder is either
growkit's own, byte for byte, or it is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.carrying import code_of
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.scratch import temporary
from growkit.families.family import families

GENERATE = "custom_generate/generate.py"


def named_code(folder: Folder) -> dict[str, Any]:
    """What names code that transformers would run: ``{file: its auto_map}``, and own generation."""
    found: dict[str, Any] = {}
    for name in folder.names("*.json"):
        if "/" in name or not name.endswith("config.json"):
            continue
        try:
            auto_map = folder.json(name).get("auto_map")
        except InputError:
            continue  # what reads it says so
        if auto_map:
            found[name] = auto_map
    if folder.has(GENERATE):
        found[GENERATE] = True
    return found


def foreign_code(folder: Folder) -> list[str]:
    """Names of the files that name code which is not growkit's own, and of that code."""
    named = named_code(folder)
    if not named or (named.keys() == {"config.json"} and _is_growkits(folder)):
        return []
    text = json.dumps(named)
    called = [name for name in code_of(folder) if name.removesuffix(".py") in text]
    return [*named, *called, *(name for name in code_of(folder) if name not in called)]


def same_code(first: Folder, second: Folder) -> bool:
    """Whether two folders name the same code, and hold it byte for byte."""
    if named_code(first) != named_code(second):
        return False
    names = code_of(first), code_of(second)
    return names[0] == names[1] and all(first.bytes(n) == second.bytes(n) for n in names[0])


def growkits_code(model_type: Any) -> Mapping[str, bytes]:
    """The code that growkit writes beside models of a type, by file name; empty for most."""
    for family in families().values():
        if model_type in family.model_types and family.write_code:
            with temporary("code") as scratch:
                family.write_code(scratch)
                return {path.name: path.read_bytes() for path in sorted(scratch.glob("*.py"))}
    return {}


def _is_growkits(folder: Folder) -> bool:
    config = folder.json("config.json")
    model_type = config.get("model_type")
    code = growkits_code(model_type)
    maps = [f.auto_map for f in families().values() if model_type in f.model_types]
    return (
        bool(code)
        and config.get("auto_map") in [dict(each) for each in maps if each]
        and sorted(code) == code_of(folder)
        and all(folder.bytes(name) == content for name, content in code.items())
    )
