"""Ids of tokens in configs and in settings of generation."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ID_KEYS = re.compile(
    r".*token_(ids?|index)|(begin_)?suppress_tokens|(bad|force)_words_ids|sequence_bias"
)
"""Keys of settings that hold ids of tokens."""


def ids_in(settings: Any) -> Iterator[int]:
    """The ids of tokens that a config or other settings name."""
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if ID_KEYS.fullmatch(key):
            yield from _numbers(value)
        else:
            yield from ids_in(value)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for entry in value:
            yield from _numbers(entry)
    elif type(value) is int:
        yield value


def with_new_ids(settings: Any, new: Mapping[int, int]) -> Any:
    """A config or other settings in which tokens have other ids; other numbers stay."""

    def renumber(value: Any) -> Any:
        if isinstance(value, list):
            return [renumber(entry) for entry in value]
        return new.get(value, value) if type(value) is int else value

    if not isinstance(settings, dict):
        return settings
    return {
        key: renumber(value) if ID_KEYS.fullmatch(key) else with_new_ids(value, new)
        for key, value in settings.items()
    }
