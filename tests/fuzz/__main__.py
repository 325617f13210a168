"""``python -m tests.fuzz --inputs 1000000``: as many inputs as one likes, one after another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from tests.fuzz.places import CORPUS
from tests.fuzz.targets import TARGETS, draw
from tests.fuzz.worker import Found, Worker, quickly

LARGEST = 12_000
"""Bytes of an input that is kept."""


def main(
    inputs: Annotated[int, typer.Option(help="How many inputs.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Other inputs with another seed.")] = 0,
    target: Annotated[str | None, typer.Option(help=f"One of {', '.join(TARGETS)}.")] = None,
    whole: Annotated[bool, typer.Option(help="Proofs save, load and generate as well.")] = False,
    keep: Annotated[Path, typer.Option(help="Where inputs that broke a rule are kept.")] = CORPUS,
) -> None:
    """Run odd inputs; every input that breaks a rule is kept, the smallest of each kind."""
    worker = Worker(*(() if whole else (quickly,)))
    try:
        tally = worker.run(lambda number: draw(seed, number, worker.places, target), 0, inputs)
    finally:
        worker.close()
    kinds: dict[str, list[Found]] = {}
    for found in tally.found:
        kinds.setdefault(found.fault.kind, []).append(found)
    for kind, every in kinds.items():
        smallest = min(every, key=lambda found: len(json.dumps(found.case.as_json())))
        text = json.dumps({"kind": kind, **smallest.case.as_json()}, indent=1)
        if len(text) <= LARGEST:
            keep.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", kind).strip("-").lower()[:80]
            (keep / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        typer.echo(f"── {len(every)} × {kind} (input {smallest.number}, {smallest.target})")
        typer.echo(smallest.fault.detail[-1200:])
    counts = sorted(tally.inputs.items())
    typer.echo(", ".join(f"{target} {code}: {n:,}" for (target, code), n in counts))
    typer.echo(f"{tally.count:,} inputs, {len(tally.found):,} faults")
    raise typer.Exit(1 if tally.found else 0)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
