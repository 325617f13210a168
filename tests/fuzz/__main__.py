"""``python -m tests.fuzz --inputs 1000000``: as many inputs as one likes, one after another."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.fuzz.places import CORPUS, corpus
from tests.fuzz.targets import TARGETS, draw
from tests.fuzz.worker import Found, Tally, Worker, quickly
from tests.sweeping import say

LARGEST = 12_000
"""Bytes of an input that is kept."""


def main(
    inputs: Annotated[int, typer.Option(help="How many inputs, at most.")] = 10_000,
    minutes: Annotated[float, typer.Option(help="How long, at most.")] = 600,
    seed: Annotated[int, typer.Option(help="Other inputs with another seed.")] = 0,
    target: Annotated[str | None, typer.Option(help=f"One of {', '.join(TARGETS)}.")] = None,
    whole: Annotated[bool, typer.Option(help="Proofs save, load and generate as well.")] = False,
    replay: Annotated[bool, typer.Option(help="Only what is in the corpus.")] = False,
    keep: Annotated[Path, typer.Option(help="Where inputs that broke a rule are kept.")] = CORPUS,
) -> None:
    """Run odd inputs; every input that breaks a rule is kept, the smallest of each kind."""
    worker, kept = Worker(*(() if whole else (quickly,))), list(corpus().items())
    until = time.monotonic() + 60 * minutes
    try:
        if replay:
            tally = worker.run(lambda number: kept[number], 0, len(kept))
        else:
            tally = worker.run(
                lambda number: draw(seed, number, worker.places, target), 0, inputs, until, progress
            )
    finally:
        worker.close()
    kinds: dict[str, list[Found]] = {}
    for found in tally.found:
        kinds.setdefault(found.fault.kind, []).append(found)
    for kind, every in kinds.items():
        smallest = min(every, key=lambda found: len(json.dumps(found.case.as_json())))
        text = json.dumps({"kind": kind, **smallest.case.as_json()}, indent=1)
        name = re.sub(r"\W+", "-", kind).strip("-").lower()[:80]
        if not replay and len(text) <= LARGEST:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        say(f"── {len(every)} × {kind} (input {smallest.number}, {smallest.target})")
        say(smallest.fault.detail[-1200:])
    progress(tally)
    raise typer.Exit(1 if tally.found else 0)


def progress(tally: Tally) -> None:
    """Inputs by target and exit code, and how many broke a rule."""
    say(", ".join(f"{target} {code}: {n:,}" for (target, code), n in sorted(tally.inputs.items())))
    say(f"{tally.count:,} inputs, {len(tally.found):,} faults, slowest {tally.slowest:.2f} s")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
