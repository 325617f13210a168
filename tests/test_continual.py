"""The experiments in ``benchmarks/continual``: what their runs do, count, measure and report."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, MixtralConfig

from benchmarks.continual import models, results, runs
from benchmarks.continual.__main__ import LINES, ROOT
from benchmarks.continual.campaign import Campaign
from benchmarks.continual.experiment import Experiment, load, names
from benchmarks.continual.report import write
from benchmarks.continual.text import END, PARTS, Text, part_of, read_text
from growkit.base.errors import InputError
from growkit.cli.demo import training_text
from growkit.extras.probing.harness import batch_of

PROCESS_STATE = ("seconds", "machine")


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
        {key: value for key, value in line.items() if key not in PROCESS_STATE}
        for line in results.read(file)
    ]


def test_kills_change_no_number(text: Text, tmp_path: Path, monkeypatch: Any) -> None:
    """In the middle of a run, and in the middle of a line."""
    experiment = small("1:1")
    once, again = (tmp_path / each / "lines" for each in ("once", "again"))
    Campaign(experiment, text, tmp_path / "once", once).carry_out()
    for kill_at in (5, 15):  # in the source, and in the arm
        steps = iter(range(kill_at))

        def mixing(*given: Any, steps: Any = steps) -> Any:
            if next(steps, None) is None:
                raise Killed
            return batch_of(*given)

        with monkeypatch.context() as patched:
            patched.setattr(runs, "batch_of", mixing)
            with pytest.raises(Killed):
                Campaign(experiment, text, tmp_path / "again", again).carry_out()
        with again.open("a") as stream:
            stream.write('{"experiment": "grow')  # a line that a kill cut short
    Campaign(experiment, text, tmp_path / "again", again).carry_out()
    assert reported(again) == reported(once)
    assert [line["run"] for line in reported(once)] == ["source", "1:1"]


def test_every_experiment_can_be_read() -> None:
    assert {"growth", "ratios", "conversions", "depth", "experts"} <= {*names()}
    for name in names():
        for scale in ("tiny", "small", "medium"):
            experiment = load(name, scale)
            assert experiment.arms[experiment.baseline].points
            assert scale == "tiny" or len(experiment.seeds) >= 3


def test_held_out_files_are_in_no_other_part(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"<{number}>" * 20, "utf-8")
    text = read_text(folder, 270, tmp_path / "work")
    tokenizer = AutoTokenizer.from_pretrained(text.folder)
    said = {part: tokenizer.decode(text.parts[part]) for part in PARTS}
    for number in range(60):
        inside = [part for part in PARTS if f"<{number}>" in said[part]]
        assert inside == [part_of(f"{number}.txt")]
    assert all(said.values())
    test = said["test"].replace(END, "")
    assert text.about["test_bytes"] == len(test.encode()) < text.about["bytes"]
    again = read_text(folder, 270, tmp_path / "again")
    assert again.about == text.about
    assert all(torch.equal(again.parts[part], text.parts[part]) for part in PARTS)
    (folder / "0.txt").write_text("another", "utf-8")
    assert read_text(folder, 270, tmp_path / "work").about["sha256"] != text.about["sha256"]


@pytest.mark.parametrize("kind", ["softmax", "diff", "experts"])
def test_the_formula_counts_what_torch_counts(kind: str) -> None:
    scale, tokens = load("growth", "tiny").scale, 8
    if kind == "experts":
        sizes = {**scale.models["softmax"], "vocab_size": scale.vocabulary}
        model = models.drawn(MixtralConfig(**sizes, num_local_experts=4), 0)
        model.set_experts_implementation("eager")  # fused products of experts are not counted
    else:  # heads of values as wide as those of keys, which nothing pads
        heads = {"head_dim": 8} | ({"value_head_dim": 8} if kind == "diff" else {})
        model = models.drawn(models.config_of(scale, kind, heads), 0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, tokens, dtype=torch.long))
    # torch counts scores that are masked: all keys for each token, not (tokens + 1) / 2 of them
    masked = (tokens - 1) * model.config.num_hidden_layers * models.attention_width(model.config)
    counted = counter.get_total_flops() // tokens
    assert counted == models.forward_flops(model, tokens) + masked


def pairs(text: str) -> list[tuple[float, float]]:
    """Sizes of differences, and their intervals."""
    found = re.findall(r"(\d\.\d+) ± (\d\.\d+)", text)
    return [(float(mean), float(margin)) for mean, margin in found]


def unfounded(summary: str, tables: str) -> list[tuple[float, float]]:
    """Differences in words, to two digits, of which no table has the third."""
    known = pairs(tables)
    return [
        (mean, margin)
        for mean, margin in pairs(summary)
        if not any(abs(mean - a) < 0.0051 and abs(margin - b) < 0.0051 for a, b in known)
    ]


def test_the_published_page_is_that_of_the_published_lines(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)  # as deep as the committed file
    folder = tmp_path / "docs" / "explanation"
    folder.mkdir(parents=True)
    made = (folder / "results.md", tmp_path / "a" / "b" / "c" / "tables.md")
    write(LINES, *made)
    published = (ROOT / "docs" / "explanation" / "results.md", LINES / "tables.md")
    page, tables = (file.read_text("utf-8") for file in made)
    assert [page, tables] == [file.read_text("utf-8") for file in published]
    summary, claims = page.split("\n## What holds\n")
    for part in ("Predicted from", "## What papers say"):  # computed from the lines, not words
        summary = summary.replace(summary.partition(part)[2].partition("## ")[0], "")
    tables += claims
    assert len(pairs(summary)) == 3
    assert not unfounded(summary, tables)
    assert unfounded(summary.replace("0.39 ± 0.03", "0.49 ± 0.03"), tables) == [(0.49, 0.03)]
    charts = {file.name: file.read_text("utf-8") for file in made[0].with_suffix("").iterdir()}
    committed = published[0].with_suffix("").iterdir()
    shown = {file.name: file.read_text("utf-8") for file in committed}
    assert charts == shown


def test_lines_changed_by_hand_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "growth.jsonl"
    committed = (LINES / "growth.jsonl").read_text("utf-8").splitlines()[0]
    line = json.loads(committed)
    texts = [f"{committed}\n{committed}", "[]", "{", "[" * 100_000]
    for key, value in line.items():
        other = value + 1 if isinstance(value, int | float) else [value]
        texts += map(json.dumps, (line | {key: other}, {k: line[k] for k in line if k != key}))
    for text in texts:
        file.write_text(text + "\n", "utf-8")
        with pytest.raises(InputError, match=r"line (1 was|2 repeats)"):
            results.read(file)
    file.write_text(committed + "\n", "utf-8")
    assert len(results.read(file)) == 1
