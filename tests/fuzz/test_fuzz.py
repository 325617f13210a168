"""A sample of the fuzzer's inputs, all that ever broke something, and faults that it must find."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from growkit.extras.inspection import inspecting
from tests.fuzz import worker as workers
from tests.fuzz.odd import SEEDS
from tests.fuzz.places import READERS, Case, corpus
from tests.fuzz.rules import Answer, judge
from tests.fuzz.targets import TARGETS, draw, opened
from tests.fuzz.worker import Tally, Worker, quickly
from tests.models import seeded

INPUTS, MANY, KEPT = 30, 20_000, 20
"""Odd inputs in the suite and at night, and those of the corpus in the suite."""
SEED = 5
LOOK = Case("llama", ("inspect", "source"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def report(tally: Tally) -> str:
    """The first input that broke a rule in each way."""
    kinds = {found.fault.kind: found for found in reversed(tally.found)}
    return "\n".join(
        f"{found.number} {found.target}: {found.fault.kind}\n{found.fault.detail[-1500:]}\n"
        f"{json.dumps(found.case.as_json())}"[:12_000]
        for found in kinds.values()
    )


def test_odd_inputs_break_no_rule(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """What breaks one is shown as it is kept in the corpus."""
    monkeypatch.setattr(worker, "prepare", quickly)
    count = pytestconfig.getoption("--inputs")
    count = count or (MANY if pytestconfig.getoption("--all") else INPUTS)
    every = [*TARGETS]  # and the others as often as they always come
    targets = [*every, *[None] * (count - len(every))]
    tally = worker.run(lambda number: draw(SEED, number, worker.places, targets[number]), 0, count)
    assert not tally.found, report(tally)
    assert tally.count == count
    assert {target for target, _ in tally.inputs} == set(TARGETS)
    assert {"0", "2"} <= {code for _, code in tally.inputs} <= {"0", "1", "2"}


def test_odd_files_of_other_programs_are_opened_or_refused(
    worker: Worker, pytestconfig: pytest.Config
) -> None:
    """As many of each reader; ``--inputs 100000`` takes a few minutes for each of them."""
    count = pytestconfig.getoption("--inputs") or (2_000 if pytestconfig.getoption("--all") else 12)

    def make(number: int) -> tuple[str, Case]:
        place = READERS[number % len(READERS)]
        return place, opened(seeded(number), worker.places, place)

    tally = worker.run(make, 0, count * len(READERS))
    assert not tally.found, report(tally)
    assert tally.count == count * len(READERS)
    assert {code for _, code in tally.inputs} == {"0", "2"}


def test_what_once_broke_a_rule_does_no_more(worker: Worker, pytestconfig: pytest.Config) -> None:
    cases = list(corpus().items())
    if not pytestconfig.getoption("--all"):
        cases = seeded(SEED).sample(cases, KEPT)
    assert cases
    tally = worker.run(lambda number: cases[number], 0, len(cases))
    assert not tally.found, report(tally)
    assert tally.count == len(cases)


@pytest.mark.parametrize("target", TARGETS)
def test_an_input_is_drawn_again(target: str, worker: Worker) -> None:
    """By its number alone; and it is the same once it was kept."""
    for number in range(5):
        drawn = [draw(3, number, worker.places, target)[1] for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert Case.from_json(drawn[0].as_json()) == drawn[0]


def test_answers_are_those_of_the_command(worker: Worker) -> None:
    place = worker.places["llama"]
    case = Case("llama", ("inspect", "source"), {"source/config.json": b"{"})
    with patch.object(workers, "judge", lambda _, answer: workers.Fault("seen", repr(answer))):
        seen = worker.run(lambda number: ("", case), 0, 1).found[0].fault.detail
    case.put(place)
    command = [sys.executable, "-m", "growkit", *case.arguments]
    result = subprocess.run(command, cwd=place.folder, capture_output=True, text=True, check=False)
    place.restore()
    assert seen == repr(Answer(result.returncode, result.stdout, result.stderr))
    assert result.returncode == 2


def hang(folder: Path) -> None:
    while True:
        pass


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "error": (lambda folder: {}["missing"], "traceback KeyError"),
    "exit": (lambda folder: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
    "crash": (lambda folder: ctypes.string_at(0), "SIGSEGV"),
    "hang": (hang, "SIGPROF"),
    "wait": (lambda folder: time.sleep(60), "SIGALRM"),
    "swell": (lambda folder: len(b"x" * (130 << 20)), "more than 1 GiB"),
    "elsewhere": (lambda folder: Path(f"/tmp/{os.getpid()}-never").write_text(""), "stray open"),
    "run": (lambda folder: os.system("true"), "stray os.system"),
    "beside": (lambda folder: (folder.parent / "left-over").touch(), "refused, but wrote"),
    "spoil": (
        lambda folder: (folder / "config.json").write_text("{}"),
        "touched source/config.json",
    ),
    "mutter": (lambda folder: os.write(2, b"libx: something is odd\n"), "several lines"),
    "warn": (lambda folder: warnings.warn("odd", stacklevel=1), "no sentence"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: a command is broken on purpose."""
    do, kind = FAULTS[fault]
    sound = inspecting.inspect

    def broken(folder: Path, **more: Any) -> Any:
        do(folder.absolute())
        return sound(folder, **more)

    case = Case("llama", ("inspect", "source"), {"source/config.json": b"{}"})
    assert not worker.run(lambda number: ("", case), 0, 1).found
    monkeypatch.setattr(inspecting, "inspect", broken)
    limits = {"hang": ("SECONDS", 0.3), "wait": ("WAIT", 0.5), "swell": ("MEMORY", 100 << 20)}
    if fault in limits:
        monkeypatch.setattr(workers, *limits[fault])
    tally = worker.run(lambda number: ("", case if number == 1 else LOOK), 1, 2)
    assert [found.fault.kind[: len(kind)] for found in tally.found] == [kind]
    monkeypatch.undo()
    after = worker.run(lambda number: ("", LOOK), 0, 1)
    assert not after.found, report(after)  # what a fault leaves behind is cleared away


LONG = ["inspect x", 2, "", f"error: {'a' * 3000}\n", "", "long sentence"]


@pytest.mark.parametrize(("line", "code", "out", "err", "made", "kind"), [*SEEDS["answers"], LONG])
def test_rules(line: str, code: int, out: str, err: str, made: str, kind: str | None) -> None:
    fault = judge(tuple(line.split()), Answer(code, out, err, made=made.split()))
    assert (fault.kind[: len(kind)] if fault and kind else fault) == kind
