"""Sizes as people ask for them: a factor like ``x2``, or a size like ``2048``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from growkit.errors import InputError


def factor(name: str, size: str, current: int) -> Fraction:
    """By what ``current`` is multiplied to become ``size``.

    Raises:
        InputError: the size is not understood, or smaller than the current one.
    """
    text = size.strip().lower()
    match = re.fullmatch(r"(x?)([0-9]{1,12})(?:/([0-9]{1,12}))?", text)
    if not match or int(match[2]) == 0 or (match[3] and (not match[1] or int(match[3]) == 0)):
        raise InputError(
            f"{name} {size!r} is not understood; write a factor like x2 or x3/2, or a size "
            f"like {2 * current}"
        )
    ratio = Fraction(int(match[2]), int(match[3] or 1)) if match[1] else None
    ratio = ratio or Fraction(int(match[2]), current)
    if ratio < 1:
        meant = f", or x{text} for a factor" if text.isdigit() and 1 < int(text) < 10 else ""
        raise InputError(
            f"{name} {size} is less than the present {current}, and nothing is taken away; "
            f"choose {current} or more{meant}"
        )
    return ratio


def check_whole(name: str, size: str, sizes: Mapping[str, Fraction]) -> None:
    """Refuse a factor that does not make whole numbers.

    Args:
        name: of the option.
        size: its value.
        sizes: of axes, as they would become.

    Raises:
        InputError: names the axis.
    """
    for axis, new in sizes.items():
        if new.denominator != 1:
            raise InputError(
                f"{name} {size} would make {axis} {float(new):g}; choose a size or a factor that "
                "makes it a whole number"
            )
