"""Sizes as people write them, in every option of a size: ``x2``, ``x1.5``, ``x3/2`` or ``2048``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from growkit.base.errors import InputError

_SIZE = re.compile(r"([x×]?)([0-9]{1,12})(?:\.([0-9]{1,12})|/([0-9]{1,12}))?")


def parsed(size: str, current: int) -> Fraction | None:
    """What ``current`` is to become; None if the size is not understood.

    Only a factor may have a point or a slash, and nothing is divided by zero.
    """
    match = _SIZE.fullmatch(size.strip().lower())
    if not match:
        return None
    sign, whole, decimals, divisor = match.groups()
    if not sign:
        return None if decimals or divisor else Fraction(whole)
    if divisor:
        return current * Fraction(int(whole), int(divisor)) if int(divisor) else None
    return current * Fraction(f"{whole}.{decimals or 0}")


def factor(name: str, size: str, current: int) -> Fraction:
    """By what ``current`` is multiplied to become ``size``.

    Raises:
        InputError: the size is not understood, or smaller than the current one.
    """
    wanted = parsed(size, current)
    digits = size.strip().lower().lstrip("x×")
    if wanted is None and digits.isdecimal():
        raise InputError(
            f"{name} {size} is too large; a number of more than 12 digits is none that a size has"
        )
    if not wanted:
        raise InputError(
            f"{name} {size!r} is not understood; write a factor like x2, x1.5 or x3/2, or a size "
            f"like {2 * current}"
        )
    if wanted < current:
        text = size.strip()
        meant = f", or x{text} for a factor" if text.isdigit() and 1 < int(text) < 10 else ""
        raise InputError(
            f"{name} {size} is less than the present {current}, and nothing is taken away; "
            f"choose {current} or more{meant}"
        )
    return wanted / current


def _decimal(number: Fraction) -> str:
    """A number that is not whole, with as many digits as show that."""
    every = (f"{float(number):.{digits}g}" for digits in range(6, 18))
    shown = (text for text in every if "e" not in text and not float(text).is_integer())
    return next(shown, str(number))


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
                f"{name} {size} would make {axis} {_decimal(new)}; choose a size or a factor that "
                "makes it a whole number"
            )
