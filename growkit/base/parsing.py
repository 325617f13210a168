"""Strict parser for untrusted JSON: no duplicate keys, bounded size and depth."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

MOST_DEPTH = 64
"""Objects inside of each other."""

MOST_PARTS = 1_000_000
"""Objects and lists in JSON, of which each takes far more memory than its two characters."""

TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


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
        raise ValueError(TOO_DEEP) from None
    check_extent(parsed, most=len(content))
    if b"\\ud" in content.lower():
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # raises if it is half of a pair
    return parsed


def check_extent(parsed: Any, most: int) -> None:
    """Refuse what has more values, or is nested deeper, than anything that was meant.

    Raises:
        ValueError: says which.
    """
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
    raise ValueError(TOO_DEEP)


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
