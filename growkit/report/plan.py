"""A plan as people read it: kinds of tensors, what the config becomes, what it takes, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from growkit.errors import shortened
from growkit.report.kinds import in_common, kinds, without_numbers
from growkit.units import duration, size

if TYPE_CHECKING:
    from growkit.results.operation import GrowResult, PlannedTensor
    from growkit.results.planned import ConfigChange, Estimate, LargePlan, RankTried

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
