"""The view of a result: a small tree of plain data, rendered by terminal, page and card.

It is made once from a result. A file in the folder ``views`` of an extra makes it of the extra's
results.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from growkit.base.errors import shortened
from growkit.base.lazy import registered
from growkit.base.units import size
from growkit.results.proof_result import failed, findings_of

Found = Mapping[str, Any]
"""Values by name, as in results and manifests."""

BEYOND = 1e300
"""Larger magnitudes are drawn as infinite: their differences would overflow."""

BYTES = {"bandwidth", "bytes", "disk_free", "disk_needed", "largest_file", "memory", "read"}
"""Keys of values in bytes."""

LONGEST_MAPPING = 400
"""Largest number of characters shown of a mapping."""

NOTHING = "–"
"""A cell in which nothing was measured."""


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value can be drawn: not missing, NaN or infinite."""
    return isinstance(value, int | float) and abs(value) < BEYOND  # false for a NaN


def figure(value: Any, form: str = ".3g") -> str:
    """Format a value; ``none`` if there is no number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    text = format(value, form)
    return text.removeprefix("-") if not text.strip("-0.%") else text  # no negative zero


def duration(seconds: float) -> str:
    """Format a duration, e.g. ``2 min 5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@dataclass(frozen=True)
class Cell:
    """A value with a note."""

    value: Any
    note: str = ""

    def __str__(self) -> str:
        return f"{figure(self.value)} ({self.note})" if self.note else figure(self.value)


@dataclass(frozen=True)
class Paragraph:
    """A sentence, without its full stop on the terminal; a style is good, warn, bad or quote."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        heads: names of the columns.
        rows: their cells; the remark of an entry is left out on the terminal.
        kinds: a letter for each column: h, a head, c, code, n, a number, v, a verdict, t, text.
        fold: title under which a page hides the table until it is opened; empty to show it.
        lines: whether terminals separate the rows with lines.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kinds: str
    fold: str = ""
    lines: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)


Part = Paragraph | Found | Grid


def recorded(result: Found, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Select values of a result or a manifest by name, all or some, without empty ones."""
    shown = {}
    for key in keys or result:
        value = result.get(key)
        if key.endswith("seconds") and is_finite(value):
            value = duration(value)
        if key in BYTES and is_finite(value):
            value = size(value)
        if isinstance(value, Mapping):
            pairs = ", ".join(f"{name} {figure(entry)}" for name, entry in value.items())
            value = shortened(pairs, LONGEST_MAPPING)
        if isinstance(value, list):
            value = "; ".join(dict.fromkeys(map(figure, value)))
        if value not in (None, ""):
            shown[key.removesuffix("_seconds").replace("_", " ")] = value
    return shown


def listing(results: Sequence[Found], keys: Sequence[str], kinds: str, fold: str = "") -> Grid:
    """Make a table of parts of a result; see ``Grid``."""
    heads = [key.replace("_", " ") for key in keys]
    return Grid(heads, [[row[key] for key in keys] for row in results], kinds, fold)


@dataclass(frozen=True)
class Chart:
    """A drawing for pages, as SVG."""

    svg: str
    caption: Cell | None = None


@dataclass(frozen=True)
class Topic:
    """Findings under a heading; left out if there are none.

    Attributes:
        title: the heading.
        text: a summary of the findings for pages, which explain them as well.
        parts: the findings.
        charts: charts of the findings.
        zero: whether the chart is left out because all values are zero.
        half: whether two such sections fit next to each other on a wide screen.
        brief: whether terminals show the parts too.
    """

    title: str
    parts: Sequence[Any] = ()
    text: str = ""
    charts: Sequence[Chart] = ()
    zero: bool = False
    half: bool = False
    brief: bool = False

    def __bool__(self) -> bool:
        return any(self.parts) or bool(self.charts) or self.zero


@dataclass(frozen=True)
class ResultView:
    """The view of a result with a verdict.

    Attributes:
        kind: good, warn or bad.
        heading: the verdict in a few words.
        about: names of the models.
        subject: the compared models or texts.
        reason: the verdict in a sentence.
        advice: the fault, and the next step.
        promise: promise of the target; empty if there is none.
        use: kind of instructions for the target's use on the page.
        loading: how the target loads, in a sentence.
        warnings: warnings to read before using the model.
        glance: the most important findings.
        sections: all findings.
    """

    kind: str
    heading: str
    about: str
    subject: str
    reason: str
    advice: Found
    sections: Sequence[Topic]
    promise: str = ""
    use: str = ""
    loading: str = ""
    warnings: Sequence[str] = ()
    glance: Found = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """The reason without the heading, with which that of a verdict begins."""
        return self.reason.removeprefix(f"{self.heading.lower()}: ")

    def brief(self) -> Iterator[Part]:
        """The part that the terminal shows."""
        yield Paragraph(self.reason, self.kind)
        for name, value in self.advice.items():
            yield Paragraph(f"{name.lower()}: {value}")
        yield self.glance
        for section in self.sections:
            if section.brief:
                yield from section.parts
        for warning in self.warnings:
            yield Paragraph(f"warning: {warning}", "warn")


def extra_views() -> dict[str, Callable[[Found], ResultView]]:
    """The functions that make views of extras' results, by the name of the result's class."""
    by_module: dict[str, dict[str, Callable[[Found], ResultView]]] = registered("views", "VIEWS")
    return {name: view for views in by_module.values() for name, view in views.items()}


def next_step(result: Found) -> str | None:
    """The advice on a target (a ``growkit.VerifyResult``), without a full stop; None if none.

    Advice on a failed finding takes precedence over advice on a kept one.
    """
    findings = findings_of(result)
    first = failed(findings)
    return first["advice"] if first else next((f["advice"] for f in findings if f["advice"]), None)
