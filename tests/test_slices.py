"""Any part of a grown tensor is the same part of the written file, however it is computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import growkit
from growkit.algebra import law
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.weight_file import WeightFile
from growkit.families.family import family_of
from growkit.families.headers import Headers
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import parse_recipe
from tests.conftest import folder_bytes, seeded
from tests.orders import sweep
from tests.slices import any_case, look

Make = Callable[..., Path]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("seed", range(300))
def test_any_slices(seed: int, tmp_path: Path) -> None:
    """Any models, steps and dtypes."""
    look(any_case(seed), tmp_path, seeded(seed), 12)


@pytest.mark.parametrize("method", ["hypercloning", "depth"])
def test_a_slice_reads_no_more_than_its_own_numbers(
    method: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("llama", num_hidden_layers=2, intermediate_size=512)
    sizes = {"hypercloning": {"ffn": "x2"}, "depth": {"layers": "3"}}[method]
    step = growkit.GrowStep(method, sizes)
    opened, counted = Checkpoint(source), [0]
    target = plan_recipe(growkit.Recipe(str(source), (step,), "out"), opened).lineage.target
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, *where: slice | None) -> torch.Tensor:
        part = read(self, name, *where)
        counted[0] += part.numel()
        return part

    monkeypatch.setattr(Checkpoint, "read", noted)
    for name, where in (("up", (slice(3, 9), slice(2, 7))), ("down", (slice(3, 9), slice(40, 90)))):
        counted[0] = 0
        part = target.read(f"model.layers.1.mlp.{name}_proj.weight", *where)
        assert 0 < counted[0] <= part.numel()


@pytest.mark.parametrize("width", [512, 4096])
def test_columns_that_are_read_of_a_file(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows longer than a page only the columns that are wanted; of others, all of them."""
    weights = {"a": torch.randn(2, 3), "b": torch.randn(6, width)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint, counted = Checkpoint(tmp_path), []
    read = WeightFile._bytes

    def noted(
        self: WeightFile, name: str, begin: int, size: int, count: int = 1, step: int = 0
    ) -> torch.Tensor:
        counted.append(size * count)
        return read(self, name, begin, size, count, step)

    monkeypatch.setattr(WeightFile, "_bytes", noted)
    part = checkpoint.read("b", slice(1, 5), slice(7, 107))
    assert part.equal(weights["b"][1:5, 7:107])
    assert sum(counted) == 4 * 4 * (100 if width > 1024 else width)


@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_no_model_depends_on_how_the_work_is_cut_up(seed: int) -> None:
    assert len(sweep(seed, 1, ways=4)) == 1


def test_noise_in_the_order_of_the_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    drawn = np.random.default_rng(0)
    monkeypatch.setattr(
        law, "noise", lambda key, rows, columns: drawn.integers(-9, 9, (len(rows), columns), "i2")
    )
    with pytest.raises(AssertionError, match="seed"):
        sweep(0, 20, ways=4)


def test_nothing_depends_on_hash_seeds(make: Make, tmp_path: Path) -> None:
    """Another process with another seed writes what this one does, whose seed is random."""
    source = make("diffllama")
    options: dict[str, Any] = {
        "method": "group-diff",
        "hidden": "x2",
        "signal_heads": "x2",
        "verify": False,
    }
    growkit.grow(source, tmp_path / "here", **options)
    script = f"import sys, growkit\ngrowkit.grow(sys.argv[1], sys.argv[2], **{options})\n"
    subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path / "there")],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
    )
    one, other = (tmp_path / name / "model.safetensors" for name in ("here", "there"))
    assert one.read_bytes() == other.read_bytes()


DATE = "SOURCE_DATE_EPOCH"


def test_on_a_given_date_every_byte_is_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATE, "1767225600")
    source, quick = make("llama"), growkit.Settings(prompts=1, length=8)
    outs = [tmp_path / name / "out" for name in ("one", "other")]
    for out in outs:
        growkit.grow(source, out, hidden="x2", verify=quick)
    one, other = map(folder_bytes, outs)
    assert one == other
    manifest = json.loads(one["growkit.json"])
    assert manifest["created"] == manifest["verification"]["created"]
    assert manifest["created"] == "2026-01-01T00:00:00+00:00"
    monkeypatch.delenv(DATE)  # the control
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=quick)
    assert folder_bytes(tmp_path / "out")["growkit.json"] != one["growkit.json"]


def test_plans_take_time_in_proportion_to_tensors(make: Make) -> None:
    """10,000 tensors are planned and traced back in seconds, four times as long as 2,500."""
    config = Checkpoint(make("llama")).config
    steps = [{"grow": "hypercloning", "hidden": "x2"}] * 2
    recipe = parse_recipe({"source": "a", "output": "b", "steps": steps}, "recipe")
    seconds = []
    for layers in (277, 1111):
        deep = config | {"num_hidden_layers": layers}
        source = Headers(family_of(config, "here"), deep, "an example")
        started = time.process_time()
        lineage = plan_recipe(recipe, source).lineage
        assert all(lineage.origin(name) == name for name in source.tensors)
        assert all(lineage.repeatable(name) for name in source.tensors)
        seconds.append(time.process_time() - started)
    assert len(source.tensors) > 9_999
    assert seconds[1] < 10 * seconds[0] + 1
    assert seconds[1] < 10
