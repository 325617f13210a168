"""A run that was killed goes on where it stopped, and ranks write what one process writes."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit import surgery
from growkit.checkpoint.journal import read_journals
from tests.conftest import folder_bytes
from tests.faults.resumed import SHARDS, Resumed
from tests.faults.world import in_child

OPTIONS: dict[str, Any] = {"hidden": "x2", "verify": False, "shard_size": SHARDS}


def weights(folder: Path) -> dict[str, bytes]:
    return {n: each for n, each in folder_bytes(folder).items() if n.startswith("model")}


@pytest.fixture
def source(make: Callable[..., Path]) -> Path:
    return make("llama")


def left(source: Path, out: Path, **options: Any) -> Path:
    """What a run leaves that is killed once its shards are finished."""

    def die(*arguments: Any) -> None:
        os._exit(9)

    def run() -> None:
        surgery.write_documents = die  # type: ignore[assignment]
        growkit.grow(source, out, **{**OPTIONS, **options})

    assert in_child(run)[0] == 9
    assert not out.exists()
    (folder,) = out.parent.glob(f".{out.name}.*")
    assert len(read_journals(folder)[1]) == 4
    return folder


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_is_finished_is_verified_and_taken_over(
    spoiled: bool, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growkit.grow(source, tmp_path / "whole", **OPTIONS)
    folder = left(source, tmp_path / "out")
    shards = sorted((folder / "new").glob("model-*.safetensors"))
    inodes = {each.name: each.stat().st_ino for each in shards}
    if spoiled:  # the control: one bit of one shard
        content = bytearray(shards[1].read_bytes())
        content[-1] ^= 1
        shards[1].write_bytes(content)
    with caplog.at_level(logging.WARNING, "growkit"):
        growkit.grow(source, tmp_path / "out", resume=True, **OPTIONS)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    again = {n for n, inode in inodes.items() if (tmp_path / "out" / n).stat().st_ino != inode}
    assert again == ({shards[1].name} if spoiled else set())
    assert ("is not what was finished" in caplog.text) == spoiled
    assert growkit.check(tmp_path / "out")["whole"]
    assert not list(tmp_path.glob(".out.*"))


@pytest.mark.parametrize("other", ["seed", "source", "layout", "version"])
def test_what_is_left_of_another_plan_is_refused(
    other: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = left(source, tmp_path / "out")
    before, options = folder_bytes(folder), dict(OPTIONS)
    if other == "seed":
        options["seed"] = 1
    elif other == "layout":
        options["shard_size"] = "30KB"
    elif other == "version":
        monkeypatch.setattr("growkit.sharing.__version__", "0")
    else:
        content = bytearray((source / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (source / "model.safetensors").write_bytes(content)
    with pytest.raises(growkit.InputError, match="cannot be gone on with: the "):
        growkit.grow(source, tmp_path / "out", resume=True, **options)
    assert folder_bytes(folder) == before
    assert [each.name for each in tmp_path.glob(".out.*")] == [folder.name]
    growkit.grow(source, tmp_path / "out", **options)  # without --resume it goes, as ever
    assert not list(tmp_path.glob(".out.*"))


def test_where_nothing_says_of_what_shards_are_they_are_written_again(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank may have finished some before the first had hashed the source."""
    folder = left(source, tmp_path / "out")
    journal = folder / "growkit.journal.0"
    journal.write_bytes(journal.read_bytes().partition(b"\n")[2])
    with caplog.at_level(logging.WARNING, "growkit"):
        growkit.grow(source, tmp_path / "out", resume=True, **OPTIONS)
    assert f"deleted {folder}" in caplog.text
    assert growkit.check(tmp_path / "out")["whole"]


def test_with_resume_what_is_finished_stays_after_a_failure(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(surgery, "write_documents", full)
        for resume in (False, True):
            with pytest.raises(KeyboardInterrupt):
                growkit.grow(source, tmp_path / "out", resume=resume, **OPTIONS)
            assert len(list(tmp_path.glob(".out.*"))) == resume
    growkit.grow(source, tmp_path / "out", resume=True, **OPTIONS)
    assert not list(tmp_path.glob(".out.*"))


def test_killed_anywhere_it_goes_on(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path)
    for seed in range(4):
        resumed.one(random.Random(seed))
    assert resumed.kills >= 4


def test_ranks_for_which_nothing_is_left_end_as_the_others(tmp_path: Path) -> None:
    resumed = Resumed(tmp_path)
    resumed.world.reset(overwrite=False)

    def killed() -> None:
        surgery.write_documents = lambda *arguments: os._exit(9)
        resumed.world.grow(1)

    assert in_child(killed)[0] == 9
    resumed.go_on(2)


def test_ranks_of_torchrun_write_what_one_process_writes(source: Path, tmp_path: Path) -> None:
    recipe = {"source": str(source), "steps": [{"grow": "hypercloning", "hidden": "x2"}]}
    recipe |= {"output": str(tmp_path / "out"), "verify": False, "shard_size": SHARDS}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *run, "-m", "growkit", "run", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    growkit.grow(source, tmp_path / "whole", **OPTIONS)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert growkit.check(tmp_path / "out")["whole"]
