"""Strict parser for untrusted YAML: text keys, no duplicates, bounded size and depth."""

from __future__ import annotations

import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from growkit.base.errors import InputError, reason
from growkit.base.parsing import TOO_DEEP, check_extent
from growkit.base.units import size
from growkit.checkpoint.folder import open_regular, read

MOST_VALUES = 10_000
"""Values that a text stands for, aliases followed."""

MOST_BYTES = 1 << 17
"""Of a file; larger ones take long to understand."""


class NotTakenError(ValueError):
    """It is YAML, but holds what nothing here is."""


def read_yaml(file: Path, kind: str) -> Any:
    """The value of a YAML file.

    Args:
        file: where it is.
        kind: what to call its contents in messages.

    Raises:
        InputError: it cannot be read, or is no such YAML; names it.
    """
    try:
        with open_regular(file) as stream:
            text = read(stream, MOST_BYTES + 1, file).decode("utf-8")
    except InputError as error:  # which names the file
        raise InputError(f"{kind} {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{kind} {file} cannot be read ({reason(error)}); give YAML in UTF-8"
        ) from None
    if len(text) > MOST_BYTES:
        raise InputError(f"{kind} {file} is larger than {size(MOST_BYTES)}; give a smaller one")
    try:
        return parse_yaml(text)
    except NotTakenError as error:
        raise InputError(f"{kind} {file} cannot be used: {reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{kind} {file} is not valid YAML: {reason(error)}") from None


def in_yaml(value: object) -> str:
    """A value as people may have written it in YAML."""
    words: dict[object, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for; keys are texts.

    Raises:
        NotTakenError: a key is no text, a number is not finite or does not fit into 64 bits.
        ValueError: it is no YAML, a key stands twice in a mapping, or there is too much of it,
            aliases followed.
    """
    try:
        parsed = yaml.load(text, _Loader)  # noqa: S506 - a safe one
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except NotTakenError:
        raise
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"line {line}: the character {text[error.position]!r} cannot stand in YAML; take it out"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(_told(error)) from None
    except Exception as error:  # a tag that does not fit its value may raise anything
        raise ValueError(str(error) or repr(error)) from None
    check_extent(parsed, most=MOST_VALUES)
    return parsed


def _told(error: yaml.MarkedYAMLError) -> str:
    """What is wrong, where, and what that is by most."""
    problem, mark = str(error.problem or error.context), error.problem_mark or error.context_mark
    place = _of(mark) if mark else ""
    if isinstance(error, ConstructorError):
        return place + problem
    remedy = "indent with blanks, not with tabs" if "\\t" in problem else "look at its indentation"
    return f"{place}{problem}; {remedy}"


def _place(node: Any) -> str:
    return _of(node.start_mark)


def _of(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: "


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """What stands for plain data, and says of it what a recipe may not have."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                told = repr(key[:100]) if isinstance(key, str) else f"that holds a {key_node.id}"
                raise NotTakenError(
                    f"{_place(key_node)}key {told} is no text; the name of a key was expected"
                )
            if key in found:
                raise ConstructorError(
                    None, None, f"key {key[:100]!r} stands twice", key_node.start_mark
                )
            if value_node.tag in _NUMBERS:
                self.check_number(value_node, f"{key[:100]} is ")
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_number(self, node: Any) -> float:
        return self.check_number(node)

    def check_number(self, node: Any, what: str = "") -> float:
        whole = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if not (-(2**63) <= number < 2**63 if whole else math.isfinite(number)):
            expected = "a number that fits into 64 bits" if whole else "a finite number"
            raise NotTakenError(f"{_place(node)}{what}{node.value[:100]}; {expected} was expected")
        return number


_Loader.yaml_constructors = yaml.SafeLoader.yaml_constructors | {
    **dict.fromkeys(_NUMBERS, _Loader.construct_number),
    # Nothing in a recipe is one of these.
    **{
        f"tag:yaml.org,2002:{kind}": _Loader.construct_undefined
        for kind in ("binary", "omap", "pairs", "set")
    },
}
