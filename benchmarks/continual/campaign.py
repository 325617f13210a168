"""Which run comes next, until all are done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.continual import results
from benchmarks.continual.experiment import Experiment, settings_of
from benchmarks.continual.models import file_name, hand_on
from benchmarks.continual.results import Line
from benchmarks.continual.text import Text
from benchmarks.continual.training import Job, Training, Watch

WAIT = 10.0
"""Seconds until runs of other processes are looked at again."""

HANDED_ON = "handed-on"
Found = Mapping[tuple[str, int, float], Line]
"""Lines by arm or source, seed and rate."""


class Campaign:
    """An experiment that is being carried out.

    Args:
        experiment: which.
        text: that is read.
        work: where checkpoints and models are kept.
        file: where lines of finished runs go; runs of the same settings that files beside it have
            are not done again.
        device: ``cpu`` or ``cuda``.
        save_every: seconds between checkpoints.
        watch: see ``Watch``.
        tell: is told what goes on, in words.
    """

    def __init__(
        self,
        experiment: Experiment,
        text: Text,
        work: Path,
        file: Path,
        device: str = "cpu",
        save_every: float = 60.0,
        watch: Watch = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.experiment, self.text, self.file, self.device = experiment, text, file, device
        self.work = work / experiment.scale_name
        self.save_every, self.watch, self.tell = save_every, watch, tell
        names = [*experiment.sources, *experiment.arms]
        self.settings = {
            name: settings_of(experiment, name, text.about["sha256"]) for name in names
        }

    def carry_out(self) -> None:
        """Do every run that nobody has done; several processes may do this at the same time."""
        self.about = results.machine(self.device)
        while jobs := self.ready():
            if not any(self._attempt(job) for job in jobs):
                time.sleep(WAIT)

    def found(self) -> dict[tuple[str, int, float], Line]:
        """The lines of this experiment at this scale, and those of other experiments' same runs.

        Raises:
            SystemExit: some of its own come from other settings.
        """
        own: dict[tuple[str, int, float], Line] = {}
        others: dict[tuple[str, int, float], Line] = {}
        for line in [*results.read_all(self.file.parent), *results.read(self.file)]:
            key = line["run"], line["seed"], line["rate"]
            fits = line["settings"] == self.settings.get(line["run"])
            if (line["experiment"], line["scale"]) != self._name:
                others |= {key: line} if fits else {}
            elif fits:
                own[key] = line
            else:
                raise SystemExit(
                    f"{self.file} has a run of {line['run']!r} with other settings or text; "
                    "move its lines away, or change the settings back"
                )
        for (name, *_), line in own.items():
            best = _other_source(self.experiment, others | own, line)
            if best is not None:
                raise SystemExit(
                    f"{self.file} has a run of {name!r} that began with the source trained at "
                    f"{line['source_rate']:g}, but {best:g} is better; move its lines away"
                )
        return shared(self.experiment, own, others)

    @property
    def _name(self) -> tuple[str, str]:
        return self.experiment.name, self.experiment.scale_name

    def ready(self) -> list[Job]:
        """Runs that can be done now, in the order in which they say most."""
        found = self.found()
        return [
            Job(self.experiment, *each)
            for each in wanted(self.experiment, found)
            if each not in found
        ]

    def _folder(self, job: Job) -> Path:
        """Where a run's checkpoints and models are; the same for all experiments that have it."""
        name = file_name(job.name)
        return self.work / f"{name}-{self.settings[job.name]}-{job.seed}-{job.rate:g}"

    def _attempt(self, job: Job) -> bool:
        """Do a run, unless another process has it or its source; whether it is done now."""
        with results.claimed(self._folder(job)) as mine:
            if not mine:
                return False
            if (job.name, job.seed, job.rate) in self.found():
                return True
            return self._do(job)

    def _do(self, job: Job) -> bool:
        """Carry a run out, and write its line."""
        line = {
            "experiment": job.experiment.name,
            "scale": job.experiment.scale_name,
            "run": job.name,
            "seed": job.seed,
            "rate": job.rate,
            "settings": self.settings[job.name],
        }
        source = None
        if job.arm is not None and job.arm.weights == "source":
            rate = best_rate(self.experiment, self.found(), job.arm.source)
            assert rate is not None
            line["source_rate"] = rate
            source = self._source(Job(self.experiment, job.arm.source, job.seed, rate))
            if source is None:
                return False
        known = self._trained(job, source)
        self.watch("before the line")
        line |= {**known, "text": self.text.about, "machine": self.about}
        results.append(self.file, line)
        self.watch("line")
        self._tidy(job)
        last = known["points"][-1]["validation"] if known["points"] else float("nan")
        self.tell(f"  validation {last:.4f}, {known['seconds']:.0f} s")
        return True

    def _source(self, job: Job) -> Path | None:
        """A trained source, trained again if only its line is left; None: another does that."""
        folder = self._folder(job) / HANDED_ON
        if not folder.is_dir():
            with results.claimed(folder.parent) as mine:
                if not mine:
                    return None
                self._trained(job, None)
                self._tidy(job)
        return folder

    def _trained(self, job: Job, source: Path | None) -> dict[str, Any]:
        """What is known of a run after it; a source is handed on."""
        self.tell(f"{job.name}, seed {job.seed}, rate {job.rate:g}")
        folder = self._folder(job)
        training = Training(
            job, self.text, folder, source, self.device, self.save_every, self.watch
        )
        known = training.run()
        if job.arm is None and not training.diverged:
            held = training.held
            hand_on(held.model, held.optimizer, self.text, folder / HANDED_ON)
        return known

    def _tidy(self, job: Job) -> None:
        for each in self._folder(job).iterdir():
            if each.name not in (HANDED_ON, "lock"):
                shutil.rmtree(each) if each.is_dir() else each.unlink()


def wanted(experiment: Experiment, found: Found) -> Iterator[tuple[str, int, float]]:
    """All runs whose turn has come: sources, then one arm after the other.

    Args:
        experiment: which.
        found: what is done.
    """
    trained = [name for name, source in experiment.sources.items() if source.trained]
    for name in trained:
        yield from _of(experiment, found, name)
    for name, arm in experiment.arms.items():
        rate = best_rate(experiment, found, arm.source)
        for each in _of(experiment, found, name):
            if arm.weights == "new" or (arm.source, each[1], rate) in found:
                yield each


def _of(experiment: Experiment, found: Found, name: str) -> Iterator[tuple[str, int, float]]:
    """All rates with the first seed, then the best one with the others."""
    first, *others = experiment.seeds
    for rate in experiment.learning_rates:
        yield name, first, rate
    if best := best_rate(experiment, found, name):
        for seed in others:
            yield name, seed, best


def shared(experiment: Experiment, own: Found, others: Found) -> dict[tuple[str, int, float], Line]:
    """The runs of an experiment with the same runs of others, if these began with its best source.

    Args:
        experiment: which.
        own: its lines.
        others: lines of others, with its settings.
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
    """The rate with the lowest validation loss at the last point; None until all were tried."""
    tried = [found.get((name, experiment.seeds[0], rate)) for rate in experiment.learning_rates]
    known: list[Any] = [line for line in tried if line is not None]
    sound = [line for line in known if "diverged" not in line]
    if len(known) < len(tried) or not sound:
        return None
    best = min(sound, key=lambda line: line["points"][-1]["validation"])
    rate: float = best["rate"]
    return rate
