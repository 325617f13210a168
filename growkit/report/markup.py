"""Pieces of HTML and XML; whatever comes from files is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape as escape_markup
from typing import Any, TypeGuard

BEYOND = 1e300
"""Larger magnitudes count as infinite: their differences would overflow."""

NOTHING = "–"
"""What stands where nothing was measured; where a table is stacked, it is left out."""

_NOT_IN_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


_WHOLE = re.compile(r"(?<![\w/.-])(?:-?[\d.]+e-\d+|--[a-z][\w-]*)(?![\w-])")
_NAMES = re.compile(r"[\w./-]{24,}")
_PARTS = re.compile(r"(?<=\w)[./_](?=\w)")


def escape(text: Any) -> str:
    """Any text as it may stand in HTML and XML, also in attributes."""
    return escape_markup(_NOT_IN_XML.sub("\ufffd", str(text)))


def flowing(text: str) -> str:
    """A text as it may stand in HTML, whose lines break between words and between parts of names.

    Browsers break lines after hyphens, such as those of ``--max-kl`` and of ``1e-14``, and a name
    that is too long for a line anywhere.
    """
    kept = _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(text))
    return _NAMES.sub(lambda name: _PARTS.sub(r"\g<0><wbr>", name[0]), kept)


def begun(text: Any) -> str:
    """A text as a sentence begins, with a capital letter; see ``flowing``."""
    text = str(text)
    return flowing(text[:1].upper() + text[1:])


def is_number(value: Any) -> TypeGuard[float]:
    """Whether something can be drawn: neither missing nor NaN nor infinite."""
    return isinstance(value, int | float) and abs(value) < BEYOND  # false for a NaN


def figure(value: Any, form: str = ".3g") -> str:
    """A number as people read it; ``none`` if there is none, not escaped."""
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


def section(title: str, text: str, *parts: str, half: bool = False) -> str:
    """What a section shows, below what that means; nothing if it shows nothing.

    Args:
        title: its heading.
        text: what is shown means.
        parts: what is shown, as HTML.
        half: whether another one fits beside it on a wide screen.
    """
    if not any(parts):
        return ""
    kind = ' class="half"' if half else ""
    return f"<section{kind}><h2>{title}</h2><p>{flowing(text)}</p>{''.join(parts)}</section>\n"


def facts(facts: Mapping[str, Any], kind: str = "") -> str:
    """Names and what they are; what is missing is left out."""
    rows = [
        f"<div><dt>{name}</dt><dd>{flowing(figure(value))}</dd></div>"
        for name, value in facts.items()
        if value is not None
    ]
    named = f' class="{kind}"' if kind else ""
    return f"<dl{named}>{''.join(rows)}</dl>" if rows else ""


def framed(chart: str, name: str = "", note: str = "") -> str:
    """A chart, with a name and a note if it needs them."""
    caption = f'{flowing(name)}<span class="small">{flowing(note)}</span>'
    return f"<figure>{f'<figcaption>{caption}</figcaption>' if name else ''}{chart}</figure>"


def more(summary: str, inside: str) -> str:
    """What is folded away until it is asked for; nothing if there is nothing inside."""
    return f"<details><summary>{summary}</summary>{inside}</details>" if inside else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], kinds: str) -> str:
    """A table, whose cells also carry the heads of their columns, to be stacked where it is narrow.

    Args:
        heads: of the columns.
        rows: what they hold; a head may be a pair of itself and its meaning.
        kinds: of the columns: h, a head, c, a code, n, a number, v, a verdict, or t, text.
    """
    if not rows:
        return ""
    heads = [escape(head) for head in heads]
    top = (f'<th scope="col" class="{k}">{h}</th>' for h, k in zip(heads, kinds, strict=True))
    body = "".join(_row(row, heads, kinds) for row in rows)
    # A box that scrolls must be within reach of the keyboard.
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{"".join(top)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[Any], heads: Sequence[str], kinds: str) -> str:
    """A row; the meaning of its head stands below, as wide as the table."""
    head, meaning = row[0] if isinstance(row[0], tuple) else (row[0], "")
    cells = "".join(map(_cell, [head, *row[1:]], heads, kinds))
    small = f'<td class="small" colspan="{len(kinds)}">{flowing(meaning)}</td>'
    return f"<tr>{cells}</tr>" + (f'<tr class="meaning">{small}</tr>' if meaning else "")


def _cell(value: Any, head: str, kind: str) -> str:
    text = flowing(figure(value))
    if kind == "h":
        return f'<th scope="row">{text}</th>'
    colour = {"✓": " good", "✗": " bad"}.get(text[:1], "") if kind == "v" else ""
    colour += " nothing" if value == NOTHING else ""
    shown = f"<code>{text}</code>" if kind == "c" else text
    named = f' data-head="{head}"' if head else ""
    return f'<td class="{kind}{colour}"{named}>{shown}</td>'
