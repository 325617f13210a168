"""Tensors that are alike but for the number of their layer or expert, as one: ``layers.0–29``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")

Place = tuple[int, ...]
"""The numbers in a name."""


def kinds(named: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Names that differ in numbers alone, by one name for all of them.

    Args:
        named: what must be the same of those that are put together, by name.

    Returns:
        In the order of their first: ``layers.0–2,5.experts.0–7.weight``, and the names.
    """
    alike: dict[tuple[tuple[str | None, ...], Hashable], dict[Place, str]] = {}
    for name, same in named.items():
        parts = name.split(".")
        form = tuple(None if _is_number(part) else part for part in parts)
        place = tuple(int(part) for part in parts if _is_number(part))
        alike.setdefault((form, same), {})[place] = name
    found: dict[str, list[str]] = {}
    for (form, _), members in alike.items():
        for spans, places in _blocks(sorted(members)):
            left = iter(spans)
            shown = ".".join(next(left) if part is None else part for part in form)
            found[shown] = [members[place] for place in places]
    return found


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0")


def _blocks(places: Sequence[Place]) -> list[tuple[tuple[str, ...], list[Place]]]:
    """Places as blocks, in which every number of a level goes with every one of the next."""
    if not places[0]:
        return [((), list(places))]
    below: dict[int, list[Place]] = {}
    for first, *rest in places:
        below.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Place, ...], list[int]] = {}
    for first, rests in below.items():
        alike.setdefault(tuple(rests), []).append(first)
    return [
        ((_spans(firsts), *spans), [(first, *rest) for first in firsts for rest in inner])
        for rests, firsts in alike.items()
        for spans, inner in _blocks(rests)
    ]


def _spans(numbers: Sequence[int]) -> str:
    """Rising numbers, e.g. ``0–2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("–".join(map(str, run)) for run in runs)


def without_numbers(text: str) -> str:
    """A text in which numbers do not count."""
    return NUMBER.sub("#", text)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers alone as one, with ``…`` for those that differ."""
    words = NUMBER.split(texts[0])
    numbers = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    shown = [each[0] if len({*each}) == 1 else "…" for each in numbers]
    return words[0] + "".join(number + word for number, word in zip(shown, words[1:], strict=True))
