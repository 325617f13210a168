"""Leads at the next size, predicted from two smaller ones before it is measured.

Leads are taken to be linear in the logarithm of the number of parameters, seed by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.continual import ages, tables
from benchmarks.continual.experiment import Experiment
from benchmarks.continual.sections import Section
from growkit.base.errors import InputError


def predict(found: Sequence[Section], experiment: Experiment, lines: Path) -> Path:
    """Write the prediction next to the lines.

    Args:
        found: all experiments.
        experiment: at the size to predict.
        lines: folder of result files.

    Raises:
        InputError: the size has lines already, or there are no two complete smaller ones.
    """
    scale, size = experiment.scale_name, experiment.scale.source_tokens
    own = [
        each
        for each in found
        if each.experiment.name == experiment.name
        and each.experiment.scale.endings == experiment.scale.endings
    ]
    if any(each.experiment.scale_name == scale for each in own):
        raise InputError(f"{scale} is measured already; a prediction comes before its first run")
    smaller = [s for s in own if s.complete and s.experiment.scale.source_tokens < size]
    smaller.sort(key=lambda each: each.experiment.scale.source_tokens)
    if len(smaller) < 2:
        raise InputError(f"a prediction for {scale} needs two complete smaller sizes; run them")
    one, other = smaller[-2:]
    few, many = (each.experiment.scale.source_tokens for each in (one, other))
    further = math.log(size / many) / math.log(many / few)
    made = [
        {
            "way": large.name,
            "extra": large.extra,
            "from": [one.experiment.scale_name, other.experiment.scale_name],
            "leads": {
                f"{age:.1f}": {
                    seed: round(lead + (lead - before[seed]) * further, 4)
                    for seed, lead in by_seed.items()
                    if seed in before
                }
                for (age, by_seed), before in zip(
                    large.leads.items(), small.leads.values(), strict=True
                )
            },
        }
        for small, large in zip(
            ages.every(one.experiment, one.made),
            ages.every(other.experiment, other.made),
            strict=True,
        )
    ]
    file = _file(lines, experiment)
    file.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    return file


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
    file = _file(lines, section.experiment)
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


def _file(lines: Path, experiment: Experiment) -> Path:
    return lines / f"{experiment.name}-{experiment.scale_name}.predicted.json"
