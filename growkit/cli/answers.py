"""How commands answer: as JSON or on a terminal, and what is said where that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from growkit.base.errors import InputError
from growkit.cli.options import say
from growkit.cli.streams import unprinted

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def told(done: str) -> Iterator[None]:
    """Whatever goes wrong in here, it is told what has been done before."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{done}; {error}" if done else str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*filter(None, [done])) from None


@contextmanager
def also_in(written: Path | str | None) -> Iterator[None]:
    """What is printed in here is no more than is written: that nobody can read it is no failure."""
    yield
    why = unprinted() if written else ""
    if why:
        say(f"warning: {why}")


def print_json(result: Any) -> None:
    """Print a result as JSON."""
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    # What steers a terminal stands in texts alone, where JSON has another way to write it.
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def console() -> Console:
    """Where results are shown."""
    from growkit.report.terminal import PlainConsole

    # Into a file or a pipe, lines stay whole.
    return PlainConsole(width=None if sys.stdout.isatty() else 200)
