"""Which run comes next, until all are done."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.continual import results
from benchmarks.continual.experiment import Experiment, Job, settings_of
from benchmarks.continual.models import hand_on
from benchmarks.continual.runs import Run
from benchmarks.continual.text import Text
from growkit.base.errors import InputError
from growkit.extras.probing.json_lines import Line, append_line

Key = tuple[str, int, float]
Found = Mapping[Key, Line]
"""Lines by arm or source, seed and rate."""


@dataclass
class Campaign:
    """An experiment that is being carried out.

    Attributes:
        experiment: which.
        text: that is read.
        work: where trained sources are kept.
        file: where lines of finished runs go; the same runs in other files of its folder are not
            repeated.
        device: ``cpu`` or ``cuda``.
        report: called with sentences about the progress.
    """

    experiment: Experiment
    text: Text
    work: Path
    file: Path
    device: str = "cpu"
    report: Callable[[str], None] = lambda _: None
    settings: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        names = [*self.experiment.sources, *self.experiment.arms]
        sha256 = self.text.about["sha256"]
        self.settings = {name: settings_of(self.experiment, name, sha256) for name in names}

    def carry_out(self) -> None:
        """Do all runs that are missing."""
        about = results.machine(self.device)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        while jobs := self.ready():
            line = self._line(jobs[0])
            append_line(self.file, {**line, "text": self.text.about, "machine": about})
            last = line["points"][-1]["validation"] if line["points"] else float("nan")
            self.report(f"  validation {last:.4f}, {line['seconds']:.0f} s")

    def found(self) -> dict[Key, Line]:
        """The lines of this experiment at this scale, and those of other experiments' same runs.

        Raises:
            InputError: some of its own come from other settings, or began with another source.
        """
        lines = results.read_all(self.file.parent)
        if self.file.suffix != ".jsonl":
            lines += results.read(self.file)
        own, others = sorted_lines(self.experiment, lines, self.settings)
        where = self.experiment.name, self.experiment.scale_name
        for line in lines:
            fits = line["settings"] == self.settings.get(line["run"])
            if (line["experiment"], line["scale"]) == where and not fits:
                raise InputError(
                    f"{self.file} has a run of {line['run']!r} with other settings or text; move "
                    "its lines away, or change the settings back"
                )
        for line in own.values():
            best = _other_source(self.experiment, others | own, line)
            if best is not None:
                raise InputError(
                    f"{self.file} has a run of {line['run']!r} that began with the source trained "
                    f"at {line['source_rate']:g}, but {best:g} is better; move its lines away"
                )
        return shared(self.experiment, own, others)

    def ready(self) -> list[Job]:
        """Runs that can be done now, in the order in which they say most."""
        found = self.found()
        missing = [each for each in wanted(self.experiment, found) if each not in found]
        return [Job(self.experiment, *each) for each in missing]

    def _line(self, job: Job) -> Line:
        """Carry a run of an arm or a source out; a source is kept for the arms."""
        first, source = {}, None
        if job.arm is not None and job.arm.weights == "source":
            rate = first["source_rate"] = best_rate(self.experiment, self.found(), job.arm.source)
            assert rate is not None
            trained = Job(self.experiment, job.arm.source, job.seed, rate)
            source = self._folder(trained)
            if not source.is_dir():  # of some, only lines are left
                self._trained(trained, None)
        return {
            "experiment": self.experiment.name,
            "scale": self.experiment.scale_name,
            "run": job.name,
            "seed": job.seed,
            "rate": job.rate,
            "settings": self.settings[job.name],
            **first,
            **self._trained(job, source),
        }

    def _folder(self, job: Job) -> Path:
        """Where a trained source is; the same for all experiments that have the run."""
        name = "".join(each if each.isalnum() else "-" for each in job.name)
        settings = f"{self.settings[job.name]}-{job.seed}-{job.rate:g}"
        return self.work / job.experiment.scale_name / f"{name}-{settings}"

    def _trained(self, job: Job, source: Path | None) -> Line:
        """Train; the source of an arm is a folder."""
        self.report(f"{job.name}, seed {job.seed}, rate {job.rate:g}")
        with tempfile.TemporaryDirectory() as scratch:
            run = Run(job, self.text, Path(scratch), source, self.device)
            line = run.finish()
        if job.arm is None and "diverged" not in line:
            hand_on(run.model, run.optimizer, self.text, self._folder(job))
        return line


def sorted_lines(
    experiment: Experiment, lines: list[Line], settings: Mapping[str, str]
) -> tuple[dict[Key, Line], dict[Key, Line]]:
    """An experiment's own lines, and those of other experiments, with the same settings.

    Args:
        experiment: which.
        lines: of all experiments.
        settings: hashes by run.
    """
    own: dict[Key, Line] = {}
    others: dict[Key, Line] = {}
    for line in lines:
        if line["settings"] == settings.get(line["run"]):
            here = line["experiment"] == experiment.name and line["scale"] == experiment.scale_name
            (own if here else others)[line["run"], line["seed"], line["rate"]] = line
    return own, others


def wanted(experiment: Experiment, found: Found) -> Iterator[Key]:
    """All runs whose turn has come: a source and its arms, then the next source.

    Args:
        experiment: which.
        found: what is done.
    """
    for source in experiment.sources.values():
        if source.trained:
            yield from _of(experiment, found, source.name)
        rate = best_rate(experiment, found, source.name)
        for name, arm in experiment.arms.items():
            if arm.source == source.name:
                for each in _of(experiment, found, name):
                    if arm.weights == "new" or (source.name, each[1], rate) in found:
                        yield each


def _of(experiment: Experiment, found: Found, name: str) -> Iterator[Key]:
    """The next rates with the seeds that choose one, then the best one with the others."""
    losses = tried(experiment, found, name)
    for rate in next_rates(experiment.learning_rates, losses):
        for seed in experiment.seeds[: experiment.tuned_with]:
            yield name, seed, rate
    if best := best_rate(experiment, found, name):
        for seed in experiment.seeds:
            yield name, seed, best


def shared(experiment: Experiment, own: Found, others: Found) -> dict[Key, Line]:
    """The runs of an experiment with the same runs of others, if these began with its best source.

    Args:
        experiment: which.
        own: its lines.
        others: lines of other experiments, with its settings.
    """
    found = {**others, **own}
    return {
        key: line
        for key, line in found.items()
        if key in own or _other_source(experiment, found, line) is None
    }


def _other_source(experiment: Experiment, found: Found, line: Line) -> float | None:
    """The best rate of the source that a run began with, if the run's source had another."""
    if "source_rate" not in line:
        return None
    best = best_rate(experiment, found, experiment.arms[line["run"]].source)
    return best if best != line["source_rate"] else None


def best_rate(experiment: Experiment, found: Found, name: str) -> float | None:
    """The rate with the lowest validation loss; None until its neighbours were tried too."""
    losses = tried(experiment, found, name)
    if next_rates(experiment.learning_rates, losses):
        return None
    best = min(losses, key=lambda rate: losses[rate])
    return best if losses[best] < math.inf else None


def tried(experiment: Experiment, found: Found, name: str) -> dict[float, float]:
    """Validation loss at the last point by rate, the mean over the seeds that choose one.

    Rates that diverged have an infinite one, rates that some of these seeds lack none.
    """
    losses = {}
    for rate in experiment.learning_rates:
        seeds = experiment.seeds[: experiment.tuned_with]
        lines = [line for seed in seeds if (line := found.get((name, seed, rate)))]
        if len(lines) == len(seeds):
            losses[rate] = fmean(
                math.inf if "diverged" in line else line["points"][-1]["validation"]
                for line in lines
            )
    return losses


def next_rates(rates: Sequence[float], losses: Mapping[float, float]) -> list[float]:
    """The middle rate, then those next to the best one; none once these were tried."""
    if not losses:
        return [rates[len(rates) // 2]]
    best = rates.index(min(losses, key=lambda rate: losses[rate]))
    return [rate for rate in rates[max(0, best - 1) : best + 2] if rate not in losses]
