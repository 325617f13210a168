"""What a folder may name that transformers would follow: code, kernels, adapters, other files.

A proof runs nothing of a folder and reads nothing outside of it. What would change that, or what
transformers computes without growkit's noticing, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.folder import Folder

KERNELS = ("attn_implementation", "experts_implementation")
"""How keys end that choose the code of attention or of experts."""

BUILT_IN = frozenset({"eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"})
"""What transformers computes with torch alone."""

DEPTH = 64
"""How deep configs are nested, at most."""

REFUSED = {
    "quantization_config": "the model is quantised; dequantise it first",
    "fusion_config": "it replaces modules of the class while it is built; remove the key",
    "configuration_files": "another file may take the place of config.json; remove the key",
    "kernel_config": "it loads code from the hub; remove the key",
    "use_kernels": "it loads code from the hub; remove the key",
}
"""Keys that have transformers build another model than the class's own, and what to do."""

NAMES_FILES = ("vocab", "merges")
"""Settings of tokenizers that are a vocabulary, or the path of one."""


def check_config_runs_nothing(config: Mapping[str, Any], where: str) -> None:
    """Refuse what a config names that is not the model class's own.

    Args:
        config: contents of a ``config.json``.
        where: what to call it.

    Raises:
        InputError: names the key.
    """
    for key, value in _entries(config, where):
        if key in REFUSED and value not in (None, False, [], {}):
            raise InputError(f"{where} has {key}: {REFUSED[key]}")
        if key.endswith(KERNELS):
            for named in value.values() if isinstance(value, dict) else [value]:
                _check_kernel(key, named, where)


def _check_kernel(key: str, value: Any, where: str) -> None:
    if value is None or (isinstance(value, str) and value in BUILT_IN):
        return
    if isinstance(value, str) and value.startswith("flash_attention_") and "/" not in value:
        return  # replaced by what torch has: the proof needs no other package
    raise InputError(
        f"{where} has {key} {value!r}, which is code that growkit does not load; choose one of "
        f"{', '.join(sorted(BUILT_IN))}, or remove the key"
    )


def without_kernels(config: Any) -> Any:
    """A config whose attention and experts run in what the class chooses with torch alone."""
    if isinstance(config, dict):
        return {
            key: without_kernels(value)
            for key, value in config.items()
            if not (
                isinstance(key, str)
                and key.endswith(KERNELS)
                and not (isinstance(value, str) and value in BUILT_IN)
            )
        }
    if isinstance(config, list):
        return [without_kernels(each) for each in config]
    return config


def check_tokenizer_reads_nothing_else(folder: Folder) -> None:
    """Refuse settings of a tokenizer that name files elsewhere.

    Raises:
        InputError: names the key and the file.
    """
    name = "tokenizer_config.json"
    if not folder.has(name):
        return
    for key, value in folder.json(name).items():
        overruled = ("special_tokens_map_file", "tokenizer_config_file", "added_tokens_file")
        named = key in NAMES_FILES or (key.endswith("_file") and key not in overruled)
        if named and isinstance(value, str) and _leads_elsewhere(folder, value):
            raise InputError(
                f"{key} in {folder.path / name} is {value!r}, a file outside of the folder; "
                "remove the key"
            )


def _leads_elsewhere(folder: Folder, value: str) -> bool:
    try:
        inside = (folder.path / value).resolve().is_relative_to(folder.path.resolve())
    except (OSError, ValueError, RuntimeError):
        return True
    return not inside


def _entries(content: Any, where: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every key with its value, however deep."""
    if depth > DEPTH:
        raise InputError(f"{where} is nested more than {DEPTH} times; copy it again")
    values = content if isinstance(content, list) else ()
    if isinstance(content, Mapping):
        yield from ((str(key), value) for key, value in content.items())
        values = list(content.values())
    for value in values:
        yield from _entries(value, where, depth + 1)
