"""Tables and progress bars for the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from growkit.base.errors import plain
from growkit.base.progress import Advance
from growkit.base.units import duration, size
from growkit.pipeline.catalogue import table
from growkit.report.markup import figure
from growkit.report.plan import show_estimate, show_plan, show_ranks
from growkit.report.probe import show_probe
from growkit.report.summary import native_name, summary
from growkit.results.advice import fault_sentence, next_step
from growkit.results.inspection import difference_sentence
from growkit.results.sentences import class_sentence, optimizer_sentence

if TYPE_CHECKING:
    from growkit.families.family import Family
    from growkit.results.inspection import Abilities, Attention, CheckResult, Inspection
    from growkit.results.operation import GrowResult, Story
    from growkit.results.probe import ProbeResult
    from growkit.results.proof import VerifyResult
    from growkit.results.result import Result


def at_a_glance(result: Inspection) -> Iterator[tuple[str, str]]:
    """What a checkpoint is: names and what they are."""
    yield "folder", result.folder
    yield "family", f"{result.family} ({result.model_class or 'no class named'})"
    yield "parameters", f"{result.parameters:,} in {result.tensors} tensors"
    yield "storage", f"{size(result.bytes)} in {result.dtype}"
    yield "embeddings", "tied" if result.tied else "untied"
    for key, value in result.config_sizes.items():
        each = value if isinstance(value, list) else [value]
        yield key, " ".join(f"{number:,}" for number in each)
    if result.attention:
        yield from _attention(result.attention)
    yield "axes", ", ".join(f"{axis} {size:,}" for axis, size in result.sizes.items())
    yield "files", ", ".join(result.files)
    for name, why in result.dropped.items():
        yield "left out", f"{name}: {why}"
    for number, step in enumerate(result.possible):
        outcome = step["promise"]
        outcome += f", as {step['becomes']}" if step["becomes"] != result.family else ""
        yield "" if number else "possible next", f"{step['command']} ({outcome})"


def _attention(attention: Attention) -> Iterator[tuple[str, str]]:
    ratio = f", {attention.ratio}:1" if attention.ratio else ""
    yield "attention", attention.variant
    yield (
        "heads",
        f"{attention.signal_heads} signal, {attention.noise_heads} noise{ratio}, "
        f"{attention.kv_heads} value heads",
    )
    for label, values in (
        ("λ per layer", attention.lambda_value),
        ("λ_init per layer", attention.lambda_init),
    ):
        if values:
            yield label, " ".join(f"{value:.4f}" for value in values)
    if attention.noise_heads and not attention.lambda_value:
        yield "λ", "projected from every token"


GOOD, WARN, BAD, GREY = (46, 158, 87), (176, 122, 16), (224, 72, 62), (128, 128, 128)
NOTEBOOK = TerminalTheme((255, 255, 255), GREY, [GREY, BAD, GOOD, WARN, GREY, GREY, GREY, GREY])
"""The colours of a notebook, each with a contrast of 3 to white and to black."""

NOTEBOOK_WIDTH = 120
"""Columns, in a box that scrolls."""


class PlainConsole(Console):
    """A console that shows names and values of folders as they are, whatever is in them."""

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text, of which nothing steers the terminal."""
        return super().render_str(plain(text), **options)


class Bars:
    """Progress with time left, on stderr: bars on a terminal, elsewhere a line now and then.

    Args:
        every: seconds between lines, so that short work leaves none in a log.
    """

    def __init__(self, every: float = 60.0) -> None:
        self._console, self._every = Console(stderr=True), every

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Advance]:
        """A bar with megabytes, speed and time left."""
        columns = (bars.DownloadColumn(), bars.TransferSpeedColumn())
        with self._shown(title, total, columns) as advance:
            yield advance

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Advance]:
        """A bar with a share and time left."""
        with self._shown(title, total, (bars.TaskProgressColumn(),)) as advance:
            yield advance

    def note(self, sentence: str) -> None:
        """A line on stderr."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _shown(
        self, title: str, total: int, columns: tuple[bars.ProgressColumn, ...]
    ) -> Iterator[Advance]:
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
                line = f"{title}: {done / total:.0%}, about {left} left"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                last, before = last + passed, done

        return advance


def show_verdict(console: Console, result: VerifyResult) -> None:
    """The verdict, what people look for under it, and its figures.

    On a failure where, why and what to do next come first.
    """
    console.print(result["reason"], style="bold green" if result["kept"] else "bold red")
    if result["fault"]:
        console.print(fault_sentence(result))
    next_one = next_step(result)
    if next_one:
        console.print(f"next: {next_one}")
    found = Table.grid(padding=(0, 2))
    for name, line in summary(result).items():
        found.add_row(name, str(line))
    console.print(found)
    console.print(_figures(result))


def _figures(result: VerifyResult) -> Table:
    """How far apart logits are, beside what rounding does to the source alone."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for head in ("strict float64", native_name(result), "source's rounding"):
        table.add_column(head, justify="right")
    columns = [result["strict_float64"], result["native"], result["rounding"]]
    for label, key in (
        ("dtype", "dtype"),
        ("device", "device"),
        ("largest |Δlogit|", "max_abs_logit_diff"),
        ("mean |Δlogit|", "mean_abs_logit_diff"),
        ("logit scale", "logit_scale"),
        ("largest / scale", "relative"),
        ("limit", "tolerance"),
        ("KL, nats per token", "kl_nats_per_token"),
        ("top-1 agreement", "top1_agreement"),
    ):
        table.add_row(label, *(_figure(column.get(key)) for column in columns))
    return table


def show_growth(console: Console, result: GrowResult) -> None:
    """What was done, or would be."""
    if result["dry_run"]:
        show_plan(console, result)
    if result["ranks"]:
        show_ranks(console, result["ranks"])
    console.print(
        f"{result['source_parameters']:,} → {result['parameters']:,} parameters, "
        f"{size(result['bytes'])} in {result['dtype']}, promise: {result['promise']}"
    )
    if line := class_sentence(result["config"]):
        console.print(line)
    if result["lost"] and not result["verification"]:  # which begins with it
        console.print(f"lost: {result['lost']}")
    if result["loads_with"]:
        console.print(f"loads with {result['loads_with']}")
    if result["optimizer"]:
        console.print(optimizer_sentence(result["optimizer"]))
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    if result["estimate"]:
        show_estimate(console, result["estimate"])
    if result["dry_run"]:
        console.print(f"dry run: nothing was written to {result['output']}")


def _figure(value: Any, form: str = ".3g") -> str:
    return str(value) if isinstance(value, int) else figure(value, form)


def show_inspection(console: Console, result: Inspection) -> None:
    """What a checkpoint is."""
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    for name, line in at_a_glance(result):
        table.add_row(name, line)
    console.print(table)


def as_html(result: Result) -> str | None:
    """What is printed of a result, for notebooks; None for parts of results.

    No paper is set, and the colours stand out from white and from black: notebooks are light or
    dark without saying so.
    """
    console = PlainConsole(width=NOTEBOOK_WIDTH, file=StringIO(), record=True)
    match type(result).__name__:
        case "VerifyResult":
            show_verdict(console, cast("VerifyResult", result))
        case "GrowResult":
            show_growth(console, cast("GrowResult", result))
            if proof := result["verification"]:
                show_verdict(console, proof)
        case "ProbeResult":
            show_probe(console, cast("ProbeResult", result))
        case "Inspection":
            show_inspection(console, cast("Inspection", result))
        case _:
            return None
    return console.export_html(theme=NOTEBOOK, inline_styles=True, code_format="<pre>{code}</pre>")


def show_families(console: Console, known: Mapping[str, Family]) -> None:
    """The families and their ``model_type``."""
    names: dict[str, list[str]] = {}
    for kind, family in known.items():
        names.setdefault(family.name, []).append(kind)
    shown = Table("family", "model_type", show_edge=False, pad_edge=False)
    for name, kinds in names.items():
        shown.add_row(name, ", ".join(kinds))
    console.print(shown)
    console.print(
        "growkit families NAME shows what can be done to the models of one, growkit families --all "
        "to all of them; growkit inspect SRC to your own"
    )


def show_abilities(console: Console, result: Sequence[Abilities]) -> None:
    """What can be done to the models of some families, a line for each operation."""
    heading, *lines = table(result)
    for line in lines:
        shown = Table(show_header=False, show_edge=False, pad_edge=False)
        for name, cell in zip(heading, line, strict=True):
            shown.add_row(name, cell)
        console.print(shown)


def show_catalogue(console: Console, result: Sequence[Abilities]) -> None:
    """What can be done to the models of every family."""
    heading, *lines = table(result)
    shown = Table(*heading, show_edge=False, pad_edge=False, show_lines=True)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)


def show_check(console: Console, result: CheckResult) -> None:
    """Whether a folder is what its manifest recorded, and every difference."""
    console.print(result["reason"], style="bold green" if result["whole"] else "bold red")
    for each in result["differences"]:
        console.print(difference_sentence(each), soft_wrap=True)


def show_demo(console: Console, story: Story) -> None:
    """The demo: the growth, its proof, and what both models write."""
    show_growth(console, story["growth"])
    verification = story["growth"]["verification"]
    if verification:
        show_verdict(console, verification)
    written = {"before": story["before"], "after": story["after"]}
    if story["before"] == story["after"]:
        written = {"before and after, the same text": story["before"]}
    for title, text in written.items():
        console.rule(f"{title}, greedily")
        console.print(Text(story["opening"]), style="dim", end="")
        console.print(Text(text))
    console.rule()
    if story["kept_in"]:
        console.print(f"the grown model is in {story['kept_in']}", soft_wrap=True)
