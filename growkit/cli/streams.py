"""Standard streams that may be closed: whether someone listens changes nothing of what was done.

What could not be printed is remembered, for those commands of which nothing else remains.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, cast

_lost: list[str] = []
"""Why something of standard output was dropped, once for every time that nobody was told yet."""


class _Patient(io.FileIO):
    """A stream to which everything can be written; what cannot be passed on is dropped."""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """See ``io.RawIOBase``."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # nobody chose not to read this
                _lost.append(str(error.strerror))
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def make_patient() -> None:
    """Let standard output and error of this process never fail, whatever they lead to.

    Where one is closed, the next file to be opened would get its number, and what is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free number, which is this. Nothing can be written to what is only
            # read, so that it shows whether anybody wanted to print.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    if not os.environ.get("COLUMNS", "1").strip("0"):  # a width that nobody knows
        del os.environ["COLUMNS"]
    for name, number in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        if stream is None or _is_standard(stream, number):
            setattr(sys, name, _patient(number, stream.encoding if stream else "utf-8"))


def unprinted() -> str:
    """Why something of the result did not reach standard output; empty if all did, or was told.

    That a reader has left, as ``head`` does, is the reader's choice, and no reason.
    """
    sys.stdout.flush()
    why = "; ".join(dict.fromkeys(_lost))
    _lost.clear()
    return why and f"the result cannot be printed ({why})"


def _is_standard(stream: object, number: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False


def _patient(number: int, encoding: str) -> io.TextIOWrapper:
    raw = _Patient(number, "w", closefd=False)
    # A terminal without → is no error.
    return io.TextIOWrapper(
        io.BufferedWriter(cast(Any, raw)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )
