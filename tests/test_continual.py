"""The experiments in ``benchmarks/continual``: a kill changes no number, and numbers are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.continual import results
from benchmarks.continual.campaign import Campaign
from benchmarks.continual.experiment import Experiment, load
from benchmarks.continual.text import Text, read_text
from benchmarks.continual.training import STATE, Job, Training
from growkit.demo.text import training_text

OF_THE_PROCESS = ("seconds", "machine")


class Killed(BaseException):
    """What nothing in a run may catch."""


def after(events: int) -> Callable[[str], None]:
    """Ends a run when so many things have happened."""
    left = iter(range(events - 1))

    def watch(_: str) -> None:
        if next(left, None) is None:
            raise Killed

    return watch


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("text")
    whole = training_text()
    for number in range(40):
        (folder / f"{number}.txt").write_text(whole[number * 1000 :][:1000], "utf-8")
    return read_text(folder, 272, folder / "work")


def small(*arms: str) -> Experiment:
    experiment = load("growth", "tiny")
    return replace(
        experiment,
        seeds=(0,),
        learning_rates=(1e-2,),
        arms={name: experiment.arms[name] for name in arms},
        baseline=arms[0],
    )


def told(file: Path) -> list[dict[str, Any]]:
    """What must not depend on kills."""
    return [
        {key: value for key, value in line.items() if key not in OF_THE_PROCESS}
        for line in results.read(file)
    ]


def test_kills_change_no_number(text: Text, tmp_path: Path) -> None:
    experiment = small("1:1")
    once, again = tmp_path / "once.jsonl", tmp_path / "again.jsonl"
    Campaign(experiment, text, tmp_path / "once", once).carry_out()
    kills = 0
    while len(told(again)) < 2:
        watch = after(9 + 4 * kills)  # every time something else is under way
        campaign = Campaign(experiment, text, tmp_path / "again", again, save_every=0, watch=watch)
        try:
            campaign.carry_out()
        except Killed:
            kills += 1
        with again.open("a") as stream:
            stream.write('{"experiment": "grow')  # a line that a kill cut short
    assert kills > 3
    assert told(again) == told(once)
    assert [line["run"] for line in told(once)] == ["source", "1:1"]


def lose_moments(state: dict[str, Any]) -> None:
    for each in state["held"]["optimizer"]["state"].values():
        each["exp_avg"].zero_()


def lose_a_step(state: dict[str, Any]) -> None:
    state["step"] += 1


def lose_weights(state: dict[str, Any]) -> None:
    state["held"]["model"]["model.norm.weight"].fill_(1.0)


def lose_the_trunk(state: dict[str, Any]) -> None:
    state["trunk"] = copy.deepcopy(state["held"])


@pytest.mark.parametrize(
    "spoil", [None, lose_moments, lose_a_step, lose_weights, lose_the_trunk], ids=str
)
def test_everything_in_a_checkpoint_counts(
    spoil: Callable[[dict[str, Any]], None] | None, text: Text, tmp_path: Path
) -> None:
    """Control: without any part of it, numbers change."""
    experiment = small("from scratch")
    experiment = replace(
        experiment, arms={"new": replace(experiment.arms["from scratch"], name="new", steps=())}
    )
    job, folder = Job(experiment, "new", 0, 1e-2), tmp_path / "run"
    folder.mkdir()
    expected = Training(job, text, tmp_path, None).run()
    # inside the third of five branches
    training = Training(job, text, folder, None, save_every=0)
    inside = [each for each in training.segments if each.decays][2]

    def watch(event: str) -> None:
        if event == "step" and training.trunk and training.step == inside.begin + 1:
            raise Killed

    training.watch = watch
    with pytest.raises(Killed):
        training.run()
    if spoil:
        state = torch.load(folder / STATE, weights_only=True)
        spoil(state)
        torch.save(state, folder / STATE)
    found = Training(job, text, folder, None).run()
    expected.pop("seconds"), found.pop("seconds")
    assert (found == expected) == (spoil is None)
