"""Results and progress on terminals."""

import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growkit.base.errors import plain, shortened
from growkit.base.progress import Advance
from growkit.base.units import size, spans
from growkit.report.engine_page import engine_view
from growkit.report.proof_page import proof_view
from growkit.report.view import (
    Cell,
    Found,
    Grid,
    Paragraph,
    Part,
    duration,
    extra_views,
    figure,
    listing,
    next_step,
    recorded,
)
from growkit.results import Result

STYLES = {"good": "bold green", "warn": "yellow", "bad": "bold red", "heading": "bold"}

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
STATE = ("format", "moments", "step", "groups", "bytes", "reset", "beside")
"""Keys of an optimizer's state that are shown unchanged."""

TRAINER, TRAINER_GROUPS = "optimizer.pt", 2
"""Format of the states that Trainer writes, and the number of groups of its own optimizer."""

ADAPTER = ("method", "source_parameters", "parameters", "bytes")
"""The same of an adapter."""

LONGEST_VALUE = 100
"""Largest number of characters shown of a config value."""

INDEX = re.compile("0|[1-9][0-9]*")
"""A part of a name that is a number."""


def growth_parts(result: Found) -> Iterator[Part]:
    """Show a ``growkit.GrowResult``: the operation, executed or planned, and its proof."""
    if result["dry_run"]:
        yield from (_tensors(result), Paragraph(""))
    if result["dry_run"] and result["config"]:
        rows = [
            [change["key"], *(shortened(change[when] or "", LONGEST_VALUE) for when in CHANGE)]
            for change in result["config"]
        ]
        yield from (Grid(["config.json", *CHANGE], rows, "ttt"), Paragraph(""))
    if result["ranks"]:
        yield _ranks(result["ranks"])
    loads_with = f"loads with {result['loads_with']}" if result["loads_with"] else None
    sentences = [result["inferred"], _class_change(result["config"]), loads_with]
    if not result["verification"]:  # whose reason begins with it
        sentences.append(_lost(result))
    yield from _summary(result, f"{size(result['bytes'])} in {result['dtype']}", sentences)
    if state := result["optimizer"]:
        yield from _optimizer(state)
    if adapter := result["adapter"]:
        yield {"adapter": adapter["path"]} | recorded(adapter, ADAPTER)
    yield recorded(result["estimate"] or {})
    if result["dry_run"]:
        yield Paragraph(f"dry run: nothing was written to {result['output']}")
    if result["verification"]:
        yield from proof_view(result["verification"]).brief()


def _class_change(changes: Sequence[Found]) -> str | None:
    """State the change of the model's class; None if it stays.

    Args:
        changes: changes of ``config.json`` (each a ``ConfigChange``).
    """
    for key in ("architectures", "model_type"):
        for change in changes:
            if change["key"] == key and change["before"] and change["after"]:
                was, now = (change[side].strip('[]"') for side in ("before", "after"))
                return f"class: {was} → {now}"
    return None


def training_hint(result: Found) -> str | None:
    """Say how to train an output (a ``growkit.GrowResult``), without a full stop.

    None if nothing was written, if the proof gives other advice, or if training goes on as before.
    """
    updates, proof = result.get("updates"), result.get("verification")
    if not updates or (proof and next_step(proof)):
        return None
    hint = "train it with growkit.training.param_groups, which takes the source's learning rate"
    if result["parameters"] <= result["source_parameters"]:
        rates = ("lr", "weight_decay", "eps")
        return hint if any(of[key] != 1 for of in updates["groups"] for key in rates) else None
    return (
        f"{hint}; before a long run, growkit probe measures on your text whether that pays, "
        "compared with training the source for longer"
    )


def _optimizer(state: Found) -> Iterator[Part]:
    """A grown optimizer's state, with what its user must know."""
    yield {"optimizer state": state["path"]} | recorded(state, STATE)
    if order := state["assumed"]:
        yield Paragraph(f"it does not name its parameters; assumed order: {order}")
    if state["format"] == TRAINER and state["groups"] > TRAINER_GROUPS:
        yield Paragraph(
            f"Trainer's own optimizer, with {TRAINER_GROUPS} groups, cannot load these "
            f"{state['groups']}; give Trainer one made of param_groups (optimizers=)"
        )


CHANGE = ("before", "after")


def _lost(result: Found) -> str | None:
    return f"lost: {result['lost']}" if result["lost"] else None


def _summary(result: Found, storage: str, sentences: Sequence[str | None]) -> Iterator[Part]:
    """Parameters and promise, more sentences, and warnings."""
    grown = f"{result['source_parameters']:,} → {result['parameters']:,} parameters"
    yield Paragraph(f"{grown}, {storage}, promise: {result['promise']}")
    yield from (Paragraph(sentence) for sentence in sentences if sentence)
    for warning in result["warnings"]:
        yield Paragraph(f"warning: {warning}", "warn")


def plan_parts(plan: Found) -> Iterator[Part]:
    """Show a ``LargePlan``: the estimated costs of a recipe."""
    yield from _summary(plan, f"in {plan['dtype']}", [_lost(plan)])
    keys = ("source", "read", "disk_needed", "files", "largest_file", "memory", "bandwidth")
    yield recorded(plan, (*keys, "write_seconds", "proof_seconds", "basis"))


def _tensors(result: Found) -> Grid:
    """The tensors of a plan, by kind."""
    lines = {line["tensor"]: line for line in result["plan"]}
    same = {
        name: f"{line['source_shapes']} {line['shape']} {line['dtype']} "
        + NUMBER.sub("#", line["why"])
        for name, line in lines.items()
    }
    rows = []
    for name, members in group_names(same).items():
        line = lines[members[0]]
        old = ", ".join(" × ".join(map(str, shape)) for shape in line["source_shapes"])
        why = in_common([lines[member]["why"] for member in members])
        rows.append([name, old, " × ".join(map(str, line["shape"])), why])
    for name, members in group_names(result["dropped"]).items():
        rows.append([name, "", "dropped", result["dropped"][members[0]]])
    return Grid(["tensor", "old shape", "new shape", "rule"], rows, "tttt")


def group_names(named: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Group names that differ only in numbers.

    Args:
        named: for each name, a value that must be equal within a group.

    Returns:
        The names of each group in the order of their first, by a name for all of them such as
        ``layers.0–2,5.experts.0–7.weight``.
    """
    groups = {(tuple(name.split(".")), same): [name] for name, same in named.items()}
    for level in reversed(range(max((name.count(".") for name in named), default=-1) + 1)):
        alike: dict[Any, dict[int, list[str]]] = {}
        for (parts, same), members in groups.items():
            number = INDEX.fullmatch(parts[level]) if level < len(parts) else None
            key = (*parts[:level], "", *parts[level + 1 :]) if number else parts
            alike.setdefault((key, same), {})[int(number[0]) if number else 0] = members
        groups = {}
        for (parts, same), by_number in alike.items():
            numbers = sorted(by_number)
            pattern = tuple(part or spans(numbers) for part in parts)
            groups[pattern, same] = [name for number in numbers for name in by_number[number]]
    return {".".join(parts): members for (parts, _), members in groups.items()}


def in_common(texts: Sequence[str]) -> str:
    """Merge texts that differ only in numbers, with ``…`` for differing numbers."""
    words = NUMBER.split(texts[0])
    numbers = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    shown = [column[0] if len({*column}) == 1 else "…" for column in numbers]
    return words[0] + "".join(number + word for number, word in zip(shown, words[1:], strict=True))


def _ranks(ranks: Sequence[Found]) -> Grid:
    """Show tried ranks with their cost; for searches by layer, only the chosen ones."""
    if ranks[0]["layer"] is not None:
        chosen = [rank for rank in ranks if rank["chosen"]]
        return listing(chosen, ("layer", "rank", "energy"), "ttt")
    return listing(ranks, ("rank", "kl_nats_per_token", "chosen"), "ttt")


def inspection_parts(result: Found) -> Iterator[Part]:
    """Show an ``Inspection`` of a checkpoint."""
    facts = {
        "folder": result["folder"],
        "family": f"{result['family']} ({result['model_class'] or 'no class named'})",
        "parameters": f"{result['parameters']:,} in {result['tensors']} tensors",
        "storage": f"{size(result['bytes'])} in {result['dtype']}",
        **recorded(result, ("quantised",)),
        "embeddings": "tied" if result["tied"] else "untied",
    }
    attention = recorded(result["attention"] or {})
    if result["inferred"]:
        yield Paragraph(result["inferred"])
    yield facts | result["config_sizes"] | attention | recorded(result, ("sizes", "files"))
    for name, why in result["dropped"].items():
        yield Paragraph(f"left out: {name}: {why}")
    steps = {}
    for step in result["possible"]:
        family = f", as {step['becomes']}" if step["becomes"] != result["family"] else ""
        steps[step["command"]] = f"{step['promise']}{family}"
    if steps:
        yield Paragraph("possible next:")
        yield steps


def family_parts(known: Mapping[str, Any]) -> Iterator[Part]:
    """Families (``growkit.model.families.family.Family``) by their ``model_type``."""
    names: dict[str, list[str]] = {}
    for kind, family in known.items():
        names.setdefault(family.name, []).append(kind)
    rows = [[name, ", ".join(kinds)] for name, kinds in names.items()]
    yield Grid(["family", "model_type"], rows, "tt")
    yield Paragraph(
        "growkit families NAME shows what can be done to the models of one, growkit families --all "
        "to all of them; growkit inspect SRC to your own"
    )


def ability_parts(table: Sequence[Sequence[str]], *, every: bool) -> Iterator[Part]:
    """Show the possible operations: a table of every family, or facts about a few."""
    heads, *rows = table
    if every:
        yield Grid(heads, rows, "t" * len(heads), lines=True)
    for row in () if every else rows:
        yield dict(zip(heads, row, strict=True))


def check_parts(result: Found) -> Iterator[Part]:
    """Show a ``CheckResult``: whether a folder matches its manifest, and every difference."""
    yield Paragraph(result["reason"], "good" if result["whole"] else "bad")
    for difference in result["differences"]:
        yield Paragraph(_difference(difference))


def _difference(differing: Found) -> str:
    """Describe a difference on one line."""
    why, both = differing["why"], ("recorded", "found")
    sizes, hashes = ([differing[f"{of}_{what}"] for of in both] for what in ("bytes", "sha256"))
    if None not in hashes:
        why = "SHA-256 {} was recorded, {} found".format(*hashes)
    elif None not in sizes:
        why = "{:,} bytes were recorded, {:,} found".format(*sizes)
    return f"{differing['what']}: {differing['file']}" + (f" ({why})" if why else "")


def story_parts(result: Found) -> Iterator[Part]:
    """Show a ``Story``: the growth of the demo, its proof, and both models' texts."""
    yield from growth_parts(result["growth"])
    written = {"before": result["before"], "after": result["after"]}
    if result["before"] == result["after"]:
        written = {"before and after, the same text": result["before"]}
    for title, text in written.items():
        yield Paragraph(f"── {title}, greedily ──", "heading")
        yield Paragraph(result["opening"] + text, "quote")
    if result["kept_in"]:
        yield Paragraph(f"the grown model is in {result['kept_in']}")
    yield Paragraph(
        "next: growkit grow SRC OUT --hidden x2 grows and proves your own model; SRC is its "
        "folder, or hf://ORG/NAME on the Hub"
    )


SHOWN: dict[str, Callable[[Any], Iterable[Part]]] = {
    "VerifyResult": lambda result: proof_view(result).brief(),
    "EngineResult": lambda result: engine_view(result).brief(),
    "GrowResult": growth_parts,
    "LargePlan": plan_parts,
    "Inspection": inspection_parts,
    "CheckResult": check_parts,
    "Story": story_parts,
}
"""Functions that show results, by the name of the result's class."""


class PlainConsole(Console):
    """A console on which names and values from folders cannot control the terminal."""

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=width, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text with its control characters escaped."""
        return super().render_str(plain(text), **options)


def parts_of(result: Any) -> Iterable[Part]:
    """Choose the parts of a result to show."""
    name = type(result).__name__
    return SHOWN[name](result) if name in SHOWN else extra_views()[name](result).brief()


def show_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print the parts of a view."""
    for part in parts:
        if not part:
            continue
        if isinstance(part, Paragraph):
            text = Text(part.text) if part.style == "quote" else part.text
            to_file = not (console.is_terminal or console.is_jupyter)  # as a file has them
            console.print(text, style=STYLES.get(part.style), soft_wrap=to_file)
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
