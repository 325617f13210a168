"""``python -m tests.fuzz --inputs 1000000``: as many inputs as one likes, one after another."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tests.fuzz.case import CORPUS, corpus
from tests.fuzz.shrink import shrink
from tests.fuzz.targets import TARGETS, draw
from tests.fuzz.worker import Found, Tally, Worker, quickly

LARGEST = 12_000
"""Bytes of an input that is kept."""


def main(
    inputs: Annotated[int, typer.Option(help="How many inputs, at most.")] = 10_000,
    minutes: Annotated[float, typer.Option(help="How long, at most.")] = 600,
    seed: Annotated[int, typer.Option(help="Other inputs with another seed.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first input.")] = 0,
    target: Annotated[str | None, typer.Option(help=f"One of {', '.join(TARGETS)}.")] = None,
    whole: Annotated[bool, typer.Option(help="Proofs save, load and generate as well.")] = False,
    replay: Annotated[bool, typer.Option(help="Only what is in the corpus.")] = False,
    keep: Annotated[Path, typer.Option(help="Where inputs that broke a rule are kept.")] = CORPUS,
) -> None:
    """Run odd inputs; every input that breaks a rule is kept, one of each kind."""
    worker = Worker(*(() if whole else (quickly,)))
    try:
        if replay:
            kept = list(corpus().items())
            tally = worker.run(lambda number: kept[number], 0, len(kept))
        else:
            until = time.monotonic() + 60 * minutes
            tally = worker.run(
                lambda number: draw(seed, number, worker.places, target),
                first,
                first + inputs,
                until,
                _progress(set()),
            )
        kinds: dict[str, list[Found]] = {}
        for found in tally.found:
            kinds.setdefault(found.fault.kind, []).append(found)
        for kind, all_of_it in kinds.items():
            smallest = min(all_of_it, key=lambda found: len(json.dumps(found.case.as_json())))
            if not replay:
                _keep(worker, smallest, keep)
            _say(f"── {len(all_of_it)} × {kind} (input {smallest.number}, {smallest.target})")
            _say(smallest.fault.detail[-1200:])
    finally:
        worker.close()
    _table(tally)
    raise typer.Exit(1 if tally.found else 0)


def _keep(worker: Worker, found: Found, folder: Path) -> None:
    small = shrink(worker, found.case, found.fault.kind)
    content = {"kind": found.fault.kind, **small.as_json()}
    text = json.dumps(content, indent=1)
    if len(text) > LARGEST:
        _say(f"too large to be kept: {found.fault.kind}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", found.fault.kind).strip("-").lower()[:80]
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _progress(known: set[str]) -> Callable[[Tally], None]:
    """How far it is, and every kind of fault when it is first seen."""

    def tell(tally: Tally) -> None:
        for found in tally.found:
            if found.fault.kind not in known:
                known.add(found.fault.kind)
                line = " ".join(found.case.arguments)[:200]
                _say(f"{found.fault.kind} (input {found.number}, {found.target}: {line!r})")
        _say(_line(tally))

    return tell


def _table(tally: Tally) -> None:
    _say(f"{'target':12}{'inputs':>10}{'exit 0':>10}{'1':>8}{'2':>10}{'other':>8}{'s':>8}")
    for target in sorted({name for name, _ in tally.inputs}):
        codes = {code: n for (name, code), n in tally.inputs.items() if name == target}
        known = [codes.pop(code, 0) for code in ("0", "1", "2")]
        row = [sum(known) + sum(codes.values()), *known, sum(codes.values())]
        widths = (10, 10, 8, 10, 8)
        cells = "".join(f"{n:>{w},}" for n, w in zip(row, widths, strict=True))
        _say(f"{target[:12]:12}{cells}{tally.seconds[target]:>8.0f}")
    _say(_line(tally))


def _line(tally: Tally) -> str:
    kinds = len({found.fault.kind for found in tally.found})
    return (
        f"{tally.count:,} inputs, {len(tally.found):,} broke a rule in {kinds} ways; "
        f"the slowest took {tally.slowest:.2f} s"
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
