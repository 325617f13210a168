"""Readable sizes, durations, dates and ranges."""

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import groupby

from growkit.base.errors import InputError

UNITS = ("bytes", "kB", "MB", "GB", "TB")

GIVEN_DATE = "SOURCE_DATE_EPOCH"
"""https://reproducible-builds.org/specs/source-date-epoch/"""

LAST_SECOND = 253402300799
"""Last second of the year 9999, since 1970."""


def size(count: float, units: Sequence[str] = UNITS) -> str:
    """Format bytes, e.g. ``6.43 MB``, or other units, each a thousand times the previous one."""
    *smaller, largest = units
    for unit in smaller:
        if float(f"{count:.3g}") < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {largest}" if count < 1000 else f"{count:,.0f} {largest}"


def spans(numbers: Sequence[int], dash: str = "–") -> str:
    """Format ascending numbers, e.g. ``0–2,5``."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}{dash}{last}" for first, last in ends)


def given_date() -> datetime | None:
    """The date that the environment sets for reproducible files; None if it sets none.

    Raises:
        InputError: the value is not a number of seconds since 1970.
    """
    text = os.environ.get(GIVEN_DATE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= LAST_SECOND):
        raise InputError(
            f"{GIVEN_DATE} is {text!r}; seconds since 1970 were expected, such as 1767225600, or "
            "nothing"
        )
    return datetime.fromtimestamp(int(text), timezone.utc)


def today() -> str:
    """The given date, or now: ISO 8601 in UTC, to the second.

    Raises:
        InputError: see ``given_date``.
    """
    return (given_date() or datetime.now(timezone.utc)).isoformat(timespec="seconds")
