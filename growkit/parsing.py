"""JSON and YAML that nobody vouches for: keys stand once, and there is an end to everything."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from functools import partial
from typing import Any

import yaml
from yaml.constructor import ConstructorError

MOST_DEPTH = 64
"""Objects inside of each other."""

MOST_PARTS = 1_000_000
"""Objects and lists in JSON, of which each takes far more memory than its two characters."""

MOST_VALUES = 10_000
"""Values that a YAML text stands for, aliases followed."""

_TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


def parse_json(content: bytes, digits: int = 100) -> Any:
    """The value that a JSON text stands for.

    Args:
        content: the text, in UTF-8.
        digits: of a whole number, at most.

    Raises:
        ValueError: it is no JSON, a key stands twice in an object, a number is not finite or has
            more digits, a text is half of a surrogate pair, or there is too much of it.
    """
    parts = content.count(b"{") + content.count(b"[")
    if parts > MOST_PARTS:
        raise ValueError(f"it has {parts:,} objects and lists, more than {MOST_PARTS:,}")
    try:
        parsed = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=partial(_whole, digits),
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_extent(parsed, most=len(content))
    if b"\\ud" in content.lower():
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # raises if it is half of a pair
    return parsed


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for; keys are texts.

    Raises:
        ValueError: it is no YAML, a key stands twice in a mapping or is no text, a number is not
            finite or does not fit into 64 bits, or there is too much of it, aliases followed.
    """
    try:
        parsed = yaml.load(text, _Loader)  # noqa: S506 - a safe one
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except Exception as error:  # a tag that does not fit its value may raise anything
        raise ValueError(str(error) or repr(error)) from None
    _check_extent(parsed, most=MOST_VALUES)
    return parsed


def _check_extent(parsed: Any, most: int) -> None:
    level, values = [parsed], 0
    for _ in range(MOST_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return
        values += sum(map(len, level))
        if values > most:
            raise ValueError(f"it stands for more than {most:,} values")
        level = [
            each for part in level for each in (part.values() if isinstance(part, dict) else part)
        ]
    raise ValueError(_TOO_DEEP)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:100]!r} stands twice")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is not a number that JSON has")
    return number


def _whole(digits: int, text: str) -> int:
    if len(text.lstrip("-")) > digits:
        raise ValueError(f"{text[:30]}… is a number of more than {digits} digits")
    return int(text)


class _Loader(yaml.SafeLoader):
    """What stands for plain data, and says of it what a recipe may not have."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                raise ConstructorError(
                    None, None, f"key {str(key)[:100]!r} is no text", key_node.start_mark
                )
            if key in found:
                raise ConstructorError(
                    None, None, f"key {key[:100]!r} stands twice", key_node.start_mark
                )
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_number(self, node: Any) -> float:
        whole = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if not (-(2**63) <= number < 2**63 if whole else math.isfinite(number)):
            raise ValueError(f"{node.value[:100]} is no number that fits into 64 bits")
        return number


_Loader.yaml_constructors = yaml.SafeLoader.yaml_constructors | {
    **{f"tag:yaml.org,2002:{kind}": _Loader.construct_number for kind in ("int", "float")},
    # Nothing in a recipe is one of these.
    **{
        f"tag:yaml.org,2002:{kind}": _Loader.construct_undefined
        for kind in ("binary", "omap", "pairs", "set")
    },
}
