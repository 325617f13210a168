"""Leads at the next size, which were predicted from two smaller ones before it was measured.

Leads were taken to be linear in the logarithm of the number of parameters, seed by seed. The
predictions lie next to the lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.continual import ages, tables
from benchmarks.continual.sections import Section


def compared(found: Sequence[Section], lines: Path) -> Iterator[str]:
    """What was predicted with as much compute again, and what was measured, of all sizes."""
    rows = [row for section in found for row in _rows(section, lines)]
    if rows:
        head = ["", "age, predicted", "measured", "lead, predicted", "measured"]
        yield (
            "Predicted from the two smaller sizes before the first run, 1 × (leads: at the "
            "greatest age):\n\n"
        ) + tables.table(head, rows)


def _rows(section: Section, lines: Path) -> Iterator[list[str]]:
    file = lines / f"{section.experiment.name}-{section.experiment.scale_name}.predicted.json"
    if not file.exists():
        return
    measured = {
        (way.name, way.extra): way
        for way in ages.every(section.experiment, section.made)
        if way.extra == ages.AGAIN and len(way.leads) == len(way.ages)
    }
    for each in json.loads(file.read_text("utf-8")):
        way = measured.get((each["way"], each["extra"]))
        if way is None:
            continue
        leads = {  # a size may be measured at fewer ages, the first ones
            float(age): {int(seed): lead for seed, lead in by_seed.items()}
            for (age, by_seed), _ in zip(each["leads"].items(), way.ages, strict=False)
        }
        predicted = ages.Way(way.name, way.extra, leads, tuple(leads), way.seeds, way.bits)
        yield [
            f"{section.experiment.scale_name}, {way.name}",
            *(str(found.crossing) for found in (predicted, way)),
            *(tables.signed(found.at(max(found.leads))) for found in (predicted, way)),
        ]
