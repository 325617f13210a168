"""What a probe found, as people read it: a sentence, the order, what is noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from growkit.results.probe import ProbeResult, difference_between, nats, probe_next

HEADS = (
    *("", "candidate", "parameters", "rate", "loss", "spread", "to the source", "to the first"),
    "after the last step",
)
"""Of the columns of the order."""

WORDS = {
    "ranked": "",
    "diverged": "not finite",
    "broken": "broken, not trained",
    "refused": "refused",
}


def order(result: Mapping[str, Any]) -> list[list[str]]:
    """The order, a line for each, by ``HEADS``."""
    source = next(each["name"] for each in result["candidates"] if each["source"])
    first = result["candidates"][0]["name"]
    return [
        [
            "" if each["rank"] is None else str(each["rank"]),
            called(each),
            "" if each["parameters"] is None else f"{each['parameters']:,}",
            "" if each["lr"] is None else f"{each['lr']:g}",
            WORDS[each["outcome"]] if each["loss"] is None else f"{each['loss']:.4f}",
            "" if each["spread"] is None else f"{each['spread']:.4f}",
            apart(result, each["name"], source),
            apart(result, each["name"], first),
            "" if each["last_loss"] is None else f"{each['last_loss']:.4f}",
        ]
        for each in result["candidates"]
    ]


def called(candidate: Mapping[str, Any]) -> str:
    """Its name, and that it is the source."""
    return (
        f"{candidate['name']}, trained further" if candidate["source"] else str(candidate["name"])
    )


def apart(result: Mapping[str, Any], name: str, other: str) -> str:
    """How far the loss of one is above another's, and whether that is noise; empty if unknown."""
    pair = difference_between(result, name, other)
    if pair is None:
        return ""
    sign = 1 if pair["worse"] == name else -1
    return f"{nats(sign * pair['difference'], '+')}{', noise' if pair['noise'] else ''}"


def noise(result: Mapping[str, Any]) -> list[str]:
    """Of each pair that cannot be told apart, how far it is apart, in a sentence."""
    return [
        f"noise: {pair['better']} before {pair['worse']}, by {nats(pair['difference'])} "
        f"({nats(pair['low'], '+')} to {nats(pair['high'], '+')})"
        for pair in result["differences"]
        if pair["noise"]
    ]


def why_not(result: Mapping[str, Any]) -> list[str]:
    """Of each that is not ranked by its loss, why, in a sentence."""
    return [
        f"{each['name']}: {WORDS[each['outcome']]} ({each['reason']})"
        for each in result["candidates"]
        if each["reason"]
    ]


UNITS = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs", "EFLOPs", "ZFLOPs")


def unit_of(flops: float) -> tuple[float, str]:
    """A unit that fits so many floating-point operations, and how many it is."""
    power = next((n for n in range(len(UNITS)) if flops < 1000.0 ** (n + 1)), len(UNITS) - 1)
    return 1000.0**power, UNITS[power]


def compute(flops: float) -> str:
    """Floating-point operations, e.g. ``3.1 TFLOPs``."""
    unit, name = unit_of(flops)
    return f"{flops / unit:.3g} {name}"


def show_probe(console: Console, result: ProbeResult) -> None:
    """The order of the candidates, those that are not in it, and what was compared."""
    console.print(result["reason"], style="bold", soft_wrap=True)
    console.print(f"next: {probe_next(result)}", soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head == "candidate" else "right")
    for line in order(result):
        table.add_row(*line)
    console.print(table)
    for sentence in (*noise(result), *why_not(result)):
        console.print(sentence, soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    for sentence in told(result):
        console.print(sentence, soft_wrap=True)


def told(result: Mapping[str, Any]) -> Sequence[str]:
    """What the figures are."""
    if result["equal_compute"] is None:
        return []
    return [
        f"losses in nats per token on {result['held_out_tokens']:,} held-out tokens after "
        f"{compute(result['equal_compute'])} of training each; mean and standard deviation over "
        f"{result['seeds']} seeds",
        result["rule"],
    ]
