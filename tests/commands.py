"""The command line, as tests ask it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from growkit.base.progress import Advance
from growkit.cli.commands import app

testing._get_command = cache(get_command)  # made once, as in a process of its own


class Counted:
    """Progress as anybody may show it."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.total: dict[str, int] = {}

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Advance]:
        self.done[title], self.total[title] = 0, total

        def advance(count: int) -> None:
            self.done[title] += count

        yield advance


def cli(*words: object) -> Result:
    """The answer of the command line to some words, on a wide terminal."""
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def refusal(*words: object) -> str:
    """The one sentence with which a command line is refused."""
    done = cli(*words)
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line
