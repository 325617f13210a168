"""Experiments with their lines, from which everything that is published is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.continual import results
from benchmarks.continual.analysis import Outcome, outcomes
from benchmarks.continual.campaign import shared, sorted_lines, wanted
from benchmarks.continual.experiment import Experiment, load, names, settings_of
from growkit.extras.probing.json_lines import Line


@dataclass(frozen=True)
class Section:
    """An experiment at a scale.

    Attributes:
        experiment: which.
        runs: lines of it.
        missing: how many runs are known to be missing.
        left_out: how many lines come from other settings.
        made: outcomes of its sources and arms.
    """

    experiment: Experiment
    runs: Sequence[Line]
    missing: int
    left_out: int
    made: Mapping[str, Outcome]

    @property
    def complete(self) -> bool:
        """Whether all runs are done."""
        return bool(self.runs) and not self.missing

    @property
    def arms(self) -> dict[str, Outcome]:
        """Outcomes without those of sources."""
        return {name: self.made[name] for name in self.experiment.arms if name in self.made}


def read(folder: Path) -> list[Section]:
    """All experiments of which there are lines, at all of their scales.

    Args:
        folder: of result files.
    """
    return [each for name in names() for each in _sections(name, folder)]


def _sections(name: str, folder: Path) -> Iterator[Section]:
    lines, every = results.read(folder / f"{name}.jsonl"), results.read_all(folder)
    for scale in dict.fromkeys(line["scale"] for line in lines):
        experiment = load(name, scale)
        known = {*experiment.sources, *experiment.arms}
        texts = dict.fromkeys(line["text"]["sha256"] for line in every)
        own: dict[tuple[str, int, float], Line] = {}
        others: dict[tuple[str, int, float], Line] = {}
        for text in texts:
            settings = {run: settings_of(experiment, run, text) for run in known}
            mine, theirs = sorted_lines(experiment, every, settings)
            own, others = own | mine, others | theirs
        fit = shared(experiment, own, others)
        left_out = sum(line["scale"] == scale for line in lines) - len(own)
        missing = sum(each not in fit for each in wanted(experiment, fit))
        yield Section(experiment, [*fit.values()], missing, left_out, outcomes(experiment, fit))
