"""What commands print: results on stdout, everything else on stderr.

Either stream may be closed: whether somebody reads what is printed changes nothing in what was
done. What could not be printed is remembered, for commands that leave nothing else.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from growkit.base.errors import InputError, plain

if TYPE_CHECKING:
    from rich.console import Console

_lost: list[str] = []
"""Why something of standard output was dropped, until ``unprinted`` reports it."""


def say(message: str) -> None:
    """Print a sentence that is no result."""
    typer.echo(plain(message, keep="\n"), err=True)


@contextmanager
def after(done: str) -> Iterator[None]:
    """Begin the message of an error in here with what was done before."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{done}; {error}" if done else str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*filter(None, [done])) from None


def print_result(
    result: Any,
    as_json: bool,
    written: Path | str | None = None,
    shown: Callable[[Console, Any], None] | None = None,
) -> None:
    """Print a result.

    Args:
        result: JSON's types alone.
        as_json: print it as JSON.
        written: a file that holds it as well, so that it is no failure if it cannot be printed.
        shown: prints it on a console; None for the view of results.
    """
    if as_json:
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        # Only strings hold characters that steer a terminal, and JSON can escape these.
        shown_text = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        typer.echo("".join(shown_text))
    else:
        from growkit.report.terminal import PlainConsole, show_result

        # Into a file or a pipe, lines stay whole.
        (shown or show_result)(PlainConsole(width=None if sys.stdout.isatty() else 200), result)
    why = unprinted() if written else ""
    if why:
        say(f"warning: {why}")


class _DroppingStream(io.FileIO):
    """A stream that drops what cannot be written, and never fails."""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """See ``io.RawIOBase``."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.fileno() == 1 and error.errno != errno.EPIPE:  # not the reader's choice
                _lost.append(str(error.strerror))
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def make_patient() -> None:
    """Let standard output and error of this process never fail, wherever they lead.

    Where one is closed, the next file to be opened would get its number, and what is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free number, which is this one. Writing to a file that is open for
            # reading fails, which shows whether there was anything to print.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    if not os.environ.get("COLUMNS", "1").strip("0"):  # an unknown width
        del os.environ["COLUMNS"]
    for name, number in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        if stream is None or _is_standard(stream, number):
            raw = _DroppingStream(number, "w", closefd=False)
            patient = io.TextIOWrapper(
                io.BufferedWriter(cast(Any, raw)),
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",  # a terminal without → is no error
                line_buffering=number == 2 or raw.isatty(),
            )
            setattr(sys, name, patient)


def unprinted() -> str:
    """Why some of the result did not reach standard output, once; empty if all of it did.

    It is no reason that a reader has left, as ``head`` does.
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
