"""Standard streams that may be closed: whether someone listens changes nothing of what was done."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, cast


class _Patient(io.FileIO):
    """A stream to which everything can be written; what cannot be passed on is dropped."""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """See ``io.RawIOBase``."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # nobody chose not to read this
                sys.stderr.write(f"warning: the result cannot be printed ({error.strerror})\n")
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
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this
    for name, number in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        if stream is None or _is_standard(stream, number):
            setattr(sys, name, _patient(number, stream.encoding if stream else "utf-8"))


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
