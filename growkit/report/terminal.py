"""Results and progress on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growkit.base.errors import plain
from growkit.base.progress import Advance
from growkit.base.units import duration
from growkit.report import operation
from growkit.report.probe import probe_view
from growkit.report.proof import proof_view
from growkit.report.view import Cell, Paragraph, Part, figure
from growkit.results import Result

SHOWN: dict[str, Callable[[Any], Iterable[Part]]] = {
    "VerifyResult": lambda result: proof_view(result).brief(),
    "ProbeResult": lambda result: probe_view(result).brief(),
    "GrowResult": operation.growth_parts,
    "LargePlan": operation.plan_parts,
    "Inspection": operation.inspection_parts,
    "CheckResult": operation.check_parts,
    "Story": operation.story_parts,
}
"""What is shown of results, by the name of their class."""

STYLES = {"good": "bold green", "warn": "yellow", "bad": "bold red", "heading": "bold"}


class PlainConsole(Console):
    """A console on which names and values from folders cannot control the terminal."""

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text with its control characters escaped."""
        return super().render_str(plain(text), **options)


def parts_of(result: Any) -> Iterable[Part]:
    """What is shown of a result."""
    return SHOWN[type(result).__name__](result)


def show_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print the parts of a view."""
    for part in parts:
        if not part:
            continue
        if isinstance(part, Paragraph):
            text = Text(part.text) if part.style == "quote" else part.text
            whole = not (console.is_terminal or console.is_jupyter)  # as a file has them
            console.print(text, style=STYLES.get(part.style), soft_wrap=whole)
        elif isinstance(part, Mapping):
            table = Table.grid(padding=(0, 2))
            for name, value in part.items():
                table.add_row(name, figure(value))
            console.print(table)
        else:
            table = Table(show_edge=False, pad_edge=False, show_lines=part.lines)
            for head, kind in zip(part.heads, part.kinds, strict=True):
                table.add_column(head, justify="right" if kind == "n" else "left", overflow="fold")
            for row in part.rows:
                cells = (cell.value if isinstance(cell, Cell) else cell for cell in row)
                table.add_row(*map(figure, cells))
            console.print(table)


def show(result: Result) -> None:
    """Print a result as the command line does."""
    show_parts(PlainConsole(), parts_of(result))


class Bars:
    """Progress with time left, on stderr: bars on a terminal, elsewhere a line now and then.

    Args:
        every: seconds between lines, so that short work leaves none in a log.
    """

    def __init__(self, every: float = 60.0) -> None:
        self._console, self._every = Console(stderr=True), every

    def bytes(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """A bar with megabytes, speed and time left."""
        return self._shown(title, total, bars.DownloadColumn(), bars.TransferSpeedColumn())

    def steps(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """A bar with a share and time left."""
        return self._shown(title, total, bars.TaskProgressColumn())

    def note(self, sentence: str) -> None:
        """A line on stderr."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _shown(self, title: str, total: int, *columns: bars.ProgressColumn) -> Iterator[Advance]:
        if not self._console.is_terminal:
            yield self._in_lines(title, total)
            return
        shown = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            *columns,
            bars.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        with shown:
            task = shown.add_task(title, total=total)
            yield lambda count: shown.advance(task, count)

    def _in_lines(self, title: str, total: int) -> Advance:
        last, done, before = time.monotonic(), 0, 0

        def advance(count: int) -> None:
            nonlocal last, done, before
            done += count
            passed = time.monotonic() - last
            if before < done < total and passed >= self._every:
                left = duration(passed * (total - done) / (done - before))
                self.note(f"{title}: {done / total:.0%}, about {left} left")
                last, before = last + passed, done

        return advance
