"""A plan as people read it: kinds of tensors, what the config becomes, what it takes, ranks."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from growkit.base.errors import shortened
from growkit.base.units import duration, size

if TYPE_CHECKING:
    from growkit.results.operation import (
        ConfigChange,
        Estimate,
        GrowResult,
        LargePlan,
        PlannedTensor,
        RankTried,
    )


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")

Place = tuple[int, ...]
"""The numbers in a name."""


def kinds(named: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Names that differ in numbers alone, by one name for all of them.

    Args:
        named: what must be the same of those that are put together, by name.

    Returns:
        In the order of their first: ``layers.0–2,5.experts.0–7.weight``, and the names.
    """
    alike: dict[tuple[tuple[str | None, ...], Hashable], dict[Place, str]] = {}
    for name, same in named.items():
        parts = name.split(".")
        form = tuple(None if _is_number(part) else part for part in parts)
        place = tuple(int(part) for part in parts if _is_number(part))
        alike.setdefault((form, same), {})[place] = name
    found: dict[str, list[str]] = {}
    for (form, _), members in alike.items():
        for spans, places in _blocks(sorted(members)):
            left = iter(spans)
            shown = ".".join(next(left) if part is None else part for part in form)
            found[shown] = [members[place] for place in places]
    return found


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0")


def _blocks(places: Sequence[Place]) -> list[tuple[tuple[str, ...], list[Place]]]:
    """Places as blocks, in which every number of a level goes with every one of the next."""
    if not places[0]:
        return [((), list(places))]
    below: dict[int, list[Place]] = {}
    for first, *rest in places:
        below.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Place, ...], list[int]] = {}
    for first, rests in below.items():
        alike.setdefault(tuple(rests), []).append(first)
    return [
        ((_spans(firsts), *spans), [(first, *rest) for first in firsts for rest in inner])
        for rests, firsts in alike.items()
        for spans, inner in _blocks(rests)
    ]


def _spans(numbers: Sequence[int]) -> str:
    """Rising numbers, e.g. ``0–2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("–".join(map(str, run)) for run in runs)


def without_numbers(text: str) -> str:
    """A text in which numbers do not count."""
    return NUMBER.sub("#", text)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers alone as one, with ``…`` for those that differ."""
    words = NUMBER.split(texts[0])
    numbers = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    shown = [each[0] if len({*each}) == 1 else "…" for each in numbers]
    return words[0] + "".join(number + word for number, word in zip(shown, words[1:], strict=True))


LONGEST_VALUE = 100
"""Characters of a config's value that are shown."""


def show_plan(console: Console, result: GrowResult) -> None:
    """Tensors by kind, and what of the config becomes another."""
    console.print(_tensors(result))
    if result["config"]:
        console.print()
        console.print(_config(result["config"]))
    console.print()


def _tensors(result: GrowResult) -> Table:
    table = _table("tensor", "old shape", "new shape", "rule")
    lines = {line["tensor"]: line for line in result["plan"]}
    for name, members in kinds({each: _alike(line) for each, line in lines.items()}).items():
        line = lines[members[0]]
        old = ", ".join(_shape(shape) for shape in line["source_shapes"])
        why = in_common([lines[each]["why"] for each in members])
        table.add_row(name, old, _shape(line["shape"]), why)
    for name, members in kinds(result["dropped"]).items():
        table.add_row(name, "", "dropped", result["dropped"][members[0]])
    return table


def _alike(line: PlannedTensor) -> str:
    """What tensors of a kind have in common, beside their names."""
    return f"{line['source_shapes']} {line['shape']} {line['dtype']} " + without_numbers(
        line["why"]
    )


def _config(changes: Sequence[ConfigChange]) -> Table:
    table = _table("config.json", "before", "after")
    for change in changes:
        table.add_row(change["key"], *(_value(change[when]) for when in ("before", "after")))
    return table


def _value(value: str | None) -> str:
    return "" if value is None else shortened(value, LONGEST_VALUE)


def show_estimate(console: Console, estimate: Estimate) -> None:
    """What a run takes, and what that rests on."""
    times = f"about {duration(estimate['write_seconds'])} to write"
    if estimate["proof_seconds"] is not None:
        times += f", {duration(estimate['proof_seconds'])} to prove"
    found = Table.grid(padding=(0, 2))
    disk = f"{size(estimate['disk_needed'])} needed, {size(estimate['disk_free'])} free"
    found.add_row("disk", disk)
    found.add_row("memory", f"about {size(estimate['memory'])}")
    found.add_row("time", f"{times} ({estimate['basis']})")
    console.print(found)


def show_large(console: Console, plan: LargePlan) -> None:
    """What a recipe takes."""
    console.print(
        f"{plan['source_parameters']:,} → {plan['parameters']:,} parameters in {plan['dtype']}, "
        f"promise: {plan['promise']}"
    )
    if plan["lost"]:
        console.print(f"lost: {plan['lost']}")
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    found = Table.grid(padding=(0, 2))
    found.add_row("source", f"{size(plan['read'])}, {plan['source']}")
    several = plan["files"] > 1
    files = f"{plan['files']} files of at most" if several else "one file of"
    weights = f"weights in {files} {size(plan['largest_file'])}"
    found.add_row("disk", f"{size(plan['disk_needed'])}, {weights}")
    found.add_row("memory", f"about {size(plan['memory'])}")
    bandwidth = plan["bandwidth"]
    disk = f"at {size(bandwidth)} a second" if bandwidth else "where the disk keeps up"
    times = f"about {duration(plan['write_seconds'])} to write {disk}"
    if plan["proof_seconds"] is not None:
        times += f", {duration(plan['proof_seconds'])} to prove"
    found.add_row("time", f"{times} ({plan['basis']})")
    console.print(found)


def show_ranks(console: Console, ranks: Sequence[RankTried]) -> None:
    """Ranks that were tried, and what they cost; of those of single layers, the chosen ones."""
    if ranks[0]["layer"] is not None:
        table = _table("layer", "rank", "energy kept")
        for each in ranks:
            if each["chosen"]:
                table.add_row(str(each["layer"]), str(each["rank"]), f"{each['energy']:.6f}")
    else:
        table = _table("rank", "KL, nats per token", "")
        for each in ranks:
            cost, chosen = each["kl_nats_per_token"], "chosen" if each["chosen"] else ""
            table.add_row(str(each["rank"]), f"{cost:.3g}", chosen)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape))
