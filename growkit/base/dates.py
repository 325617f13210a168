"""The date that is written down, which can be given: then the same run writes the same files."""

from __future__ import annotations

import os
from datetime import datetime, timezone

from growkit.base.errors import InputError

GIVEN = "SOURCE_DATE_EPOCH"
"""https://reproducible-builds.org/specs/source-date-epoch/"""

LAST = 253402300799
"""Of the year 9999."""


def given() -> int | None:
    """The date that the environment gives, in seconds since 1970; None if it gives none.

    Raises:
        InputError: it is no such number.
    """
    text = os.environ.get(GIVEN, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= LAST):
        raise InputError(
            f"{GIVEN} is {text!r}; seconds since 1970 were expected, such as 1767225600, or nothing"
        )
    return int(text)


def today() -> str:
    """Now, or the date that is given: ISO 8601 in UTC, to the second.

    Raises:
        InputError: see ``given``.
    """
    seconds = given()
    if seconds is None:
        return datetime.now(timezone.utc).isoformat(timespec="seconds")
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
