"""The runs of ``benchmarks/continual``: a kill changes no number, and arms begin as they should."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.continual import results
from benchmarks.continual.campaign import HANDED_ON, Campaign, wanted
from benchmarks.continual.experiment import Experiment, load, names
from benchmarks.continual.runs import CHECKPOINT, Job, Run
from benchmarks.continual.text import Text, read_text
from growkit.base.errors import InputError
from growkit.cli.demo.text import training_text
from growkit.probing.lines import append_line
from growkit.probing.training import Schedule, Segment, Training

OF_THE_PROCESS = ("seconds", "machine")


class Killed(BaseException):
    """What nothing in a run may catch."""


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


def small(*arms: str, experiment: str = "growth") -> Experiment:
    found = load(experiment, "tiny")
    chosen = {name: found.arms[name] for name in arms}
    return replace(found, seeds=(0,), learning_rates=(1e-2,), arms=chosen, baseline=arms[0])


def reported(file: Path) -> list[dict[str, Any]]:
    """What must not depend on kills."""
    return [
        {key: value for key, value in line.items() if key not in OF_THE_PROCESS}
        for line in results.read(file)
    ]


def test_kills_change_no_number(text: Text, tmp_path: Path, monkeypatch: Any) -> None:
    """Before a step, before a checkpoint, and in the middle of a line."""
    experiment = small("1:1")
    once, again = (tmp_path / each / "lines" for each in ("once", "again"))
    Campaign(experiment, text, tmp_path / "once", once).carry_out()
    left, save, step = 0, Training._save, Training._step

    def kill(before: Callable[..., None], self: Training, *given: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        before(self, *given)

    monkeypatch.setattr(Training, "_save", lambda self: kill(save, self))
    monkeypatch.setattr(Training, "_step", lambda self, *given: kill(step, self, *given))
    kills = 0
    while len(reported(again)) < 2:
        left = 9 + 6 * kills  # every time something else is under way
        try:
            Campaign(experiment, text, tmp_path / "again", again, save_every=0).carry_out()
        except Killed:
            kills += 1
        with again.open("a") as stream:
            stream.write('{"experiment": "grow')  # a line that a kill cut short
    assert kills >= 3
    assert reported(again) == reported(once)
    assert [line["run"] for line in reported(once)] == ["source", "1:1"]


def lose_moments(state: dict[str, Any]) -> None:
    for each in state["now"]["optimizer"]["state"].values():
        each["exp_avg"].zero_()


def lose_a_step(state: dict[str, Any]) -> None:
    state["step"] += 1


def lose_weights(state: dict[str, Any]) -> None:
    state["now"]["model"]["model.norm.weight"].fill_(1.0)


def lose_the_trunk(state: dict[str, Any]) -> None:
    state["trunk"] = copy.deepcopy(state["now"])


@pytest.mark.parametrize("spoil", [None, lose_moments, lose_a_step, lose_weights, lose_the_trunk])
def test_everything_in_a_checkpoint_counts(
    spoil: Callable[[dict[str, Any]], None] | None, text: Text, tmp_path: Path
) -> None:
    """Control: without any part of it, numbers change."""
    experiment = small("from scratch")
    arm = replace(experiment.arms["from scratch"], name="new", steps=(), points=(0.5, 1))
    job = Job(replace(experiment, arms={"new": arm}), "new", 0, 1e-2)
    (tmp_path / "run").mkdir()
    expected = Run(job, text, tmp_path).finish()
    run = Run(job, text, tmp_path / "run", save_every=0)
    inside = next(each for each in run.training.schedule.segments if each.point is not None)

    def kill(_: int) -> None:
        if run.training.trunk and run.training.step == inside.begin + 2:
            raise Killed

    with pytest.raises(Killed):
        run.training.run(kill)
    if spoil:
        state = torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)
        spoil(state)
        torch.save(state, tmp_path / "run" / CHECKPOINT)
    found = Run(job, text, tmp_path / "run").finish()
    expected.pop("seconds"), found.pop("seconds")
    assert (found == expected) == (spoil is None)


@pytest.fixture(scope="module")
def trained_on(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left of a campaign, with its lines."""
    folder = tmp_path_factory.mktemp("trained-on")
    Campaign(small("source goes on"), text, folder, folder / "lines").carry_out()
    return folder


def test_a_source_is_trained_again_if_only_its_line_is_left(
    text: Text, trained_on: Path, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    append_line(file, results.read(trained_on / "lines")[0])
    Campaign(small("source goes on"), text, tmp_path, file).carry_out()
    assert reported(file) == reported(trained_on / "lines")
    assert len(reported(file)) == 2


def test_lines_of_other_settings_are_refused(text: Text, tmp_path: Path) -> None:
    experiment = small("source goes on")
    settings = Campaign(experiment, text, tmp_path, tmp_path / "lines").settings["source"]
    line = {"experiment": "growth", "scale": "tiny", "run": "source", "seed": 0, "rate": 1e-2}
    for changed, right in ((settings, True), ("other", False)):
        campaign = Campaign(experiment, text, tmp_path, tmp_path / changed / "growth.jsonl")
        campaign.file.parent.mkdir()
        append_line(campaign.file, {**line, "settings": changed})
        if right:
            assert list(campaign.found()) == [("source", 0, 1e-2)]
        else:
            with pytest.raises(InputError, match="other settings"):
                campaign.found()


def test_the_same_run_of_another_experiment_is_not_repeated(
    text: Text, trained_on: Path, tmp_path: Path
) -> None:
    """Control: with another decay it is."""
    for line in results.read(trained_on / "lines"):
        append_line(tmp_path / "growth.jsonl", line)
    experiment = small("source goes on", experiment="depth")
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

    def turn() -> Sequence[tuple[str, int, float]]:
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


def test_grown_arms_train_by_the_law(text: Text, trained_on: Path, tmp_path: Path) -> None:
    """With copies that are kept they train as the source does; control: not with one rate."""
    source = next((trained_on / "tiny").glob(f"source-*/{HANDED_ON}"))
    experiment = load("growth", "tiny")
    losses = []
    for number, arm in enumerate(("source goes on", "1:1, keep", "1:1, new optimizer, one rate")):
        run = Run(Job(experiment, arm, 0, 1e-2), text, tmp_path / str(number), source)
        (tmp_path / str(number)).mkdir(exist_ok=True)
        run.training.schedule = Schedule([Segment(0, 3)], {3})
        losses.append(run.finish()["curve"][-1][1])
    expected, kept, other = losses
    assert kept == pytest.approx(expected, abs=1e-5)
    assert abs(other - expected) > 1e-2
