"""A run that was killed goes on where it stopped, and ranks write what one process writes."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore

import growkit
from growkit import surgery
from growkit.checkpoint.journal import read_journals
from growkit.checkpoint.reading import Checkpoint
from growkit.ranks import Together
from growkit.sharing import follow
from tests.conftest import folder_bytes
from tests.faults.resumed import SHARDS, Resumed
from tests.faults.world import ended, in_child, started

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
    (tmp_path / "kept").mkdir()
    for each in shards:  # linked, so that no new file is given the inode of a deleted one
        (tmp_path / "kept" / each.name).hardlink_to(each)
    if spoiled:  # the control: one bit of one shard
        content = bytearray(shards[1].read_bytes())
        content[-1] ^= 1
        shards[1].write_bytes(content)
    with caplog.at_level(logging.WARNING, "growkit"):
        growkit.grow(source, tmp_path / "out", resume=True, **OPTIONS)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    kept = sorted((tmp_path / "kept").iterdir())
    again = {each.name for each in kept if not each.samefile(tmp_path / "out" / each.name)}
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


@pytest.mark.parametrize("spoiled", [None, 1])
def test_ranks_look_at_tensors_together(
    spoiled: int | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in what another process looks at is told as one process tells it.

    On a given date, everything that they write is what one process writes.
    """
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    quick = growkit.Settings(prompts=1, length=8)
    recipe = growkit.Recipe(
        str(source),
        (growkit.GrowStep("hypercloning", hidden="x2"),),
        str(tmp_path / "out"),
        quick,
        shard_size=SHARDS,
    )
    divide = Together.divide
    carry = surgery.carry_over

    def spoil(source: Any, folder: Path) -> None:
        """The last bit of the last number of the largest tensor of those that a rank looks at."""
        carry(source, folder)
        tensors = Checkpoint(tmp_path / "alone" / "out").tensors
        name = sorted(tensors, key=lambda name: -tensors[name].bytes)[spoiled or 0]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = folder / index["weight_map"][name]
        content = bytearray(file.read_bytes())
        header = int.from_bytes(content[:8], "little")
        end = json.loads(content[8 : 8 + header])[name]["data_offsets"][1]
        content[8 + header + end - 4] ^= 1
        file.write_bytes(content)

    def own(ranks: Any, names: Any) -> Any:
        found = divide(ranks, names)
        (tmp_path / "own").write_text(json.dumps([list(names), list(found)]))
        return found

    def run(rank: int) -> None:
        if spoiled is not None:
            surgery.carry_over = spoil
        Together.divide = own  # type: ignore[method-assign]
        together = Together(FileStore(str(tmp_path / "store"), 2), rank, 2)
        if rank:
            follow(recipe, together)
        else:
            growkit.run(recipe, ranks=together)

    growkit.run(replace(recipe, output=str(tmp_path / "alone" / "out")))
    children = [started(partial(run, rank)) for rank in range(2)]
    assert [ended(child)[0] for child in children] == [0, 0]
    names, first = json.loads((tmp_path / "own").read_text())
    assert 0 < len(first) < len(names)
    out = tmp_path / ("out" if spoiled is None else "out.rejected")
    if spoiled is None:
        assert folder_bytes(out) == folder_bytes(tmp_path / "alone" / "out")
        manifest = json.loads((out / "growkit.json").read_text())
        assert manifest["created"] == manifest["verification"]["created"]
        assert manifest["created"] == "2026-01-01T00:00:00+00:00"
        return
    proof = json.loads((out / "growkit.json").read_text())["verification"]
    assert not proof["kept"]
    assert proof["weights_recovered"] is False
    assert proof["first_lost_tensor"] in set(names) - set(first)
    alone = growkit.verify(source, out, quick)
    changing = {"seconds", "source", "target"}
    assert {k: proof[k] for k in alone.keys() - changing} == {
        k: v for k, v in alone.items() if k not in changing
    }


@pytest.mark.parametrize("date", ["yesterday", "-1", "9" * 15, "1.5"])
def test_a_date_that_is_none_is_refused(
    date: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
    with pytest.raises(growkit.InputError, match="seconds since 1970 were expected"):
        growkit.grow(source, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()
