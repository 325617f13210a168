"""The runs of ``benchmarks/continual``: a kill changes no number, and arms begin as they should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.continual import results
from benchmarks.continual.campaign import HANDED_ON, Campaign, wanted
from benchmarks.continual.experiment import Experiment, load, names
from benchmarks.continual.models import file_name
from benchmarks.continual.schedule import Segment
from benchmarks.continual.text import Text, read_text
from benchmarks.continual.training import STATE, Job, Training
from growkit.cli.demo.text import training_text

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


def small_text(folder: Path) -> Text:
    """Forty files of a thousand characters."""
    whole = training_text()
    (folder / "files").mkdir()
    for number in range(40):
        (folder / "files" / f"{number}.txt").write_text(whole[number * 1000 :][:1000], "utf-8")
    return read_text(folder / "files", 272, folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return small_text(tmp_path_factory.mktemp("text"))


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
    once, again = (tmp_path / each / "lines" for each in ("once", "again"))
    Campaign(experiment, text, tmp_path / "once", once).carry_out()
    kills = 0
    while len(told(again)) < 2:
        watch = after(11 + 9 * kills)  # every time something else is under way
        campaign = Campaign(experiment, text, tmp_path / "again", again, save_every=0, watch=watch)
        try:
            campaign.carry_out()
        except Killed:
            kills += 1
        with again.open("a") as stream:
            stream.write('{"experiment": "grow')  # a line that a kill cut short
    assert kills >= 3
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
    "spoil",
    [None, lose_moments, lose_a_step, lose_weights, lose_the_trunk],
    ids=lambda each: getattr(each, "__name__", "nothing"),
)
def test_everything_in_a_checkpoint_counts(
    spoil: Callable[[dict[str, Any]], None] | None, text: Text, tmp_path: Path
) -> None:
    """Control: without any part of it, numbers change."""
    experiment = small("from scratch")
    arm = replace(experiment.arms["from scratch"], name="new", steps=(), points=(0.5, 1))
    experiment = replace(experiment, arms={"new": arm})
    job, folder = Job(experiment, "new", 0, 1e-2), tmp_path / "run"
    folder.mkdir()
    expected = Training(job, text, tmp_path, None).run()
    training = Training(job, text, folder, None, save_every=0)
    inside = next(each for each in training.segments if each.decays)

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


@pytest.fixture(scope="module")
def gone_on(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left of a campaign, with its lines."""
    folder = tmp_path_factory.mktemp("gone-on")
    Campaign(small("source goes on"), text, folder, folder / "lines").carry_out()
    return folder


def test_a_run_is_done_again_if_only_its_line_is_left(
    text: Text, gone_on: Path, tmp_path: Path
) -> None:
    """A source whose weights are gone is trained again; its line stays as it is."""
    file = tmp_path / "lines"
    results.append(file, results.read(gone_on / "lines")[0])
    Campaign(small("source goes on"), text, tmp_path, file).carry_out()
    assert told(file) == told(gone_on / "lines")
    assert len(told(file)) == 2


def test_lines_of_other_settings_are_refused(text: Text, tmp_path: Path) -> None:
    experiment = small("source goes on")
    settings = Campaign(experiment, text, tmp_path, tmp_path / "lines").settings["source"]
    line = {"experiment": "growth", "scale": "tiny", "run": "source", "seed": 0, "rate": 1e-2}
    for changed, right in ((settings, True), ("other", False)):
        file = tmp_path / f"{changed}.jsonl"
        results.append(file, {**line, "settings": changed})
        campaign = Campaign(experiment, text, tmp_path, file)
        if right:
            assert list(campaign.found()) == [("source", 0, 1e-2)]
        else:
            with pytest.raises(SystemExit, match="other settings"):
                campaign.found()


def test_the_same_run_of_another_experiment_is_not_done_again(
    text: Text, gone_on: Path, tmp_path: Path
) -> None:
    """Control: with another decay it is."""
    for line in results.read(gone_on / "lines"):
        results.append(tmp_path / "growth.jsonl", line)
    experiment = load("depth", "tiny")
    experiment = replace(
        experiment,
        seeds=(0,),
        learning_rates=(1e-2,),
        arms={"source goes on": experiment.arms["source goes on"]},
    )
    other = replace(experiment, scale=replace(experiment.scale, weight_decay=0.2))
    file = tmp_path / "depth.jsonl"
    assert not Campaign(experiment, text, tmp_path, file).ready()
    assert Campaign(other, text, tmp_path, file).ready()


def test_every_experiment_can_be_read() -> None:
    assert {"growth", "ratios", "conversions", "depth", "experts"} <= {*names()}
    for name in names():
        for scale in ("tiny", "small", "medium"):
            experiment = load(name, scale)
            assert experiment.arms[experiment.baseline].points
            assert scale == "tiny" or len(experiment.seeds) >= 3


def test_rates_are_chosen_with_the_first_seed_alone() -> None:
    experiment = load("growth", "tiny")
    found: dict[tuple[str, int, float], Any] = {}

    def turn() -> list[tuple[str, int, float]]:
        return [each for each in wanted(experiment, found) if each not in found]

    assert turn()[:2] == [("source", 0, 1e-3), ("source", 0, 1e-2)]
    assert ("source goes on", 0, 1e-3) not in turn()
    for rate, loss in ((1e-3, 2.0), (1e-2, 3.0)):
        found["source", 0, rate] = {"rate": rate, "points": [{"validation": loss, "test": -loss}]}
    assert turn()[0] == ("source", 1, 1e-3)
    assert ("source goes on", 0, 1e-3) in turn()
    assert ("source goes on", 1, 1e-3) not in turn()  # its source is not trained yet
    found["source", 0, 1e-3]["diverged"] = 3
    assert turn()[0] == ("source", 1, 1e-2)


def test_grown_arms_go_on_by_the_law(text: Text, gone_on: Path, tmp_path: Path) -> None:
    """With copies that are kept they train as the source does; control: not with one rate."""
    source = next((gone_on / "tiny").glob(f"source-*/{HANDED_ON}"))
    experiment = load("growth", "tiny")
    looks = {}
    for arm in ("source goes on", "1:1, keep", "1:1, new optimizer, one rate"):
        folder = tmp_path / file_name(arm)
        folder.mkdir()
        training = Training(Job(experiment, arm, 0, 1e-2), text, folder, source)
        for _ in range(3):
            training._step(Segment(0, 10))
        looks[arm] = training._loss("validation", 4)
    expected, kept, other = looks.values()
    assert kept == pytest.approx(expected, abs=1e-5)
    assert abs(other - expected) > 1e-2
