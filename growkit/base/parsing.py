"""Strict parsers for untrusted JSON and YAML: text keys, no duplicates, bounded size and depth.

``growkit.model.checkpoint.folder`` makes sentences for users of their errors.
"""

import json
import math
from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean

MAX_DEPTH = 64
"""Limit for the nesting depth of objects and lists."""

MAX_PARTS = 1_000_000
"""Limit for objects and lists in JSON: each takes far more memory than its two characters."""

MAX_VALUES = 10_000
"""Limit for the number of values in a YAML text, with aliases expanded."""

TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def parse_json(content: bytes, digits: int = 100, *, infinite: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        content: the text, in UTF-8.
        digits: limit for the digits of a whole number.
        infinite: whether ``Infinity`` is a number, as Python writes it; see ``Infinite``.

    Raises:
        ValueError: it is not JSON, an object has a key twice, a number is not finite or has more
            digits, a text has half of a surrogate pair, or there is too much of it.
    """
    parts = content.count(b"{") + content.count(b"[")
    if parts > MAX_PARTS:
        raise ValueError(f"it has {parts:,} objects and lists, more than {MAX_PARTS:,}")
    try:
        parsed = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_constant if infinite else _finite,
            parse_float=_finite,
            parse_int=partial(_whole, digits),
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check_extent(parsed, limit=len(content))
    if b"\\ud" in content.lower():
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # raises for half of a pair
    return parsed


def _check_extent(parsed: Any, limit: int) -> None:
    """Refuse more values than ``limit``, and too deep a nesting."""
    level, values = [parsed], 0
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return
        values += sum(map(len, level))
        if values > limit:
            raise ValueError(f"it has more than {limit:,} values")
        level = [
            child for part in level for child in (part.values() if isinstance(part, dict) else part)
        ]
    raise ValueError(TOO_DEEP)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key[:100]!r} appears twice")
    return mapping


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is not a JSON number")
    return number


class Infinite(dict[str, str]):
    """An infinite number in the notation of transformers 5, from a file with that of Python."""


def _constant(text: str) -> Infinite | float:
    return _finite(text) if text == "NaN" else Infinite({"__float__": text})


def as_python_writes(content: Any) -> Any:
    """A JSON value with the infinite numbers that a file had in the notation of Python."""
    match content:
        case Infinite():
            return float(content["__float__"])
        case dict():
            return {key: as_python_writes(entry) for key, entry in content.items()}
        case list():
            return [as_python_writes(entry) for entry in content]
    return content


def _whole(digits: int, text: str) -> int:
    if len(text.lstrip("-")) > digits:
        raise ValueError(f"{text[:30]}… is a number of more than {digits} digits")
    return int(text)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        ValueError: it is not YAML, a key is not text or appears twice, a number is not finite or
            does not fit into 64 bits, or there is too much of it.
    """
    try:
        parsed = yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = f"{at}{error.problem or error.context}"
        tabs = "\\t" in problem
        remedy = "indent with spaces, not with tabs" if tabs else "check its indentation"
        known = isinstance(error, ConstructorError)
        raise ValueError(problem if known else f"{problem}; {remedy}") from None
    except Exception as error:  # a tag that does not fit its value may raise anything
        raise ValueError(str(error) or repr(error)) from None
    _check_extent(parsed, limit=MAX_VALUES)
    return parsed


def in_yaml(value: object) -> str:
    """Format a value in YAML notation, for messages."""
    words: dict[object, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


ANY = "any key"
"""In a mapping of kinds, the entry for all other keys."""

WORDS = {
    str: "text",
    dict: "a mapping",
    list: "a list",
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    range: "a whole number",
}


def check_kind(value: Any, kinds: Any, what: str) -> None:
    """Refuse a value of the wrong kind, or with a part of the wrong kind.

    Args:
        value: a JSON or YAML value.
        kinds: a type, a range of whole numbers, a list of one kind, or a mapping from keys to
            kinds; several in a tuple are alternatives.
        what: name of the value in messages.

    Raises:
        InputError: names the part, and what was expected.
    """
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    kind = next((form for form in several if _is_kind(value, form)), None)
    if kind is None:
        expected = [WORDS[form if isinstance(form, type) else type(form)] for form in several]
        raise InputError(f"{what} is {in_yaml(value)}; {' or '.join(expected)} was expected")
    if isinstance(kind, list):
        for entry in value:
            check_kind(entry, kind[0], f"an entry of {what}")
    elif isinstance(kind, dict):
        for key, entry in value.items():
            if key not in kind and ANY not in kind:
                raise InputError(f"{what} has an unknown key {key!r}; {did_you_mean(key, kind)}")
            check_kind(entry, kind.get(ANY, kind.get(key)), f"{key} in {what}")


def _is_kind(value: Any, kind: Any) -> bool:
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and type(value) is not bool
    return isinstance(value, kind if isinstance(kind, type) else type(kind))


def _unusable(mark: Any, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, mark)


_YAML = "tag:yaml.org,2002:"
_NUMBERS = (f"{_YAML}int", f"{_YAML}float")


class _Loader(yaml.SafeLoader):
    """Plain data; anything else is refused."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key, place = key_node.value, key_node.start_mark
            if key_node.tag != f"{_YAML}str":
                shown = repr(key[:100]) if isinstance(key, str) else f"that holds a {key_node.id}"
                raise _unusable(place, f"key {shown} is not text; the name of a key was expected")
            if key in mapping:
                raise _unusable(place, f"key {key[:100]!r} appears twice")
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping

    def construct_number(self, node: Any) -> float:
        integer = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        if not (-(2**63) <= number < 2**63 if integer else math.isfinite(number)):
            expected = "a number that fits into 64 bits" if integer else "a finite number"
            raise _unusable(node.start_mark, f"{node.value[:100]}; {expected} was expected")
        return number


_Loader.yaml_constructors = yaml.SafeLoader.yaml_constructors | {
    **dict.fromkeys(_NUMBERS, _Loader.construct_number),
    # No recipe needs one of these.
    **{
        f"{_YAML}{kind}": _Loader.construct_undefined for kind in ["binary", "omap", "pairs", "set"]
    },
}
