"""Any part of a grown tensor is the same part of the written file, however it is computed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import growkit
from growkit.checkpoint import writing
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Config, TensorInfo
from growkit.planner import plan as plan_recipe
from growkit.planning import plan
from growkit.planning.lineage import Lineage
from growkit.recipe.files import parse_recipe
from tests.conftest import seeded

Make = Callable[..., Path]

RECIPES: list[tuple[str, list[dict[str, Any]]]] = [
    ("llama", [{"grow": "hypercloning", "hidden": "x3"}]),
    ("mistral", [{"grow": "hypercloning", "hidden": "x2", "symmetry": "keep"}]),
    ("diffllama", [{"grow": "group-diff", "hidden": "x2", "signal_heads": "x3"}]),
    ("diffllama", [{"grow": "hypercloning", "hidden": "x2"}, {"convert": "motif"}]),
    ("diffllama", [{"convert": "microsoft"}, {"grow": "hypercloning", "ffn": "x2"}]),
    ("diffllama", [{"convert": "dint"}, {"grow": "hypercloning", "hidden": "x2"}]),
    ("diff_transformer", [{"convert": "gda"}, {"grow": "group-diff", "signal_heads": "x2"}]),
    ("llama", [{"convert": "diff-v2"}, {"grow": "group-diff", "hidden": "x2"}]),
    ("llama", [{"convert": "diff"}]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "steps"), RECIPES, ids=str)
def test_slices_of_what_is_written(
    kind: str,
    steps: list[dict[str, Any]],
    dtype: torch.dtype,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"head_dim": 16} if steps[-1] == {"convert": "motif"} else {}  # λ in bfloat16
    source = make(kind, dtype=dtype, tie_word_embeddings=kind == "llama", **sizes)
    content = {"source": str(source), "output": str(tmp_path / "out"), "steps": steps}
    content["verify"] = False
    recipe = parse_recipe(content, "recipe")
    growkit.run(recipe)
    written = load_file(tmp_path / "out" / "model.safetensors")
    checkpoint = Checkpoint(source)
    lineage = Lineage(checkpoint, plan_recipe(recipe, checkpoint).plans)
    rows_read: dict[str, set[int]] = {}
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, rows: slice | None = None) -> Tensor:
        count = self.tensors[name].shape[0]
        rows_read.setdefault(name, set()).update(range(count)[rows or slice(None)])
        return read(self, name, rows)

    monkeypatch.setattr(Checkpoint, "read", noted)
    chance = seeded(len(steps))
    for name, tensor in written.items():
        for _ in range(2):
            where = [slice(*sorted(chance.choices(range(n + 1), k=2))) for n in tensor.shape]
            rows_read.clear()
            part = lineage.part(name, where)
            assert part.equal(tensor[tuple(where)]), name
            if len(lineage.plans) == 1 and lineage.plans[0].by_target[name].transform.local:
                most = where[0].stop - where[0].start
                assert sum(map(len, rows_read.values())) <= most


@pytest.mark.parametrize("symmetry", ["break", "keep"])
def test_nothing_depends_on_the_order_of_the_work(
    symmetry: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("llama", dtype=torch.bfloat16, hidden_size=48, intermediate_size=60)
    hashes = set()
    for elements, workers, small in ((1 << 10, 1, 0), (1 << 22, 2, 1 << 26), (1 << 13, 4, 1 << 10)):
        monkeypatch.setattr(plan, "AT_A_TIME", elements)
        monkeypatch.setattr(plan, "SMALL", small)
        monkeypatch.setattr(writing, "WORKERS", workers)
        out = tmp_path / f"out-{elements}"
        growkit.grow(source, out, hidden="x3", symmetry=symmetry, verify=False)  # type: ignore[arg-type]
        hashes.add(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest())
    assert len(hashes) == 1
    other = tmp_path / "other"
    growkit.grow(source, other, hidden="x3", seed=1, verify=False)
    assert hashlib.sha256((other / "model.safetensors").read_bytes()).hexdigest() not in hashes


def test_nothing_depends_on_hash_seeds(make: Make, tmp_path: Path) -> None:
    source = make("diffllama")
    script = (
        "import sys, growkit\n"
        "growkit.grow(sys.argv[1], sys.argv[2], method='group-diff', hidden='x2',"
        " signal_heads='x2', verify=False)\n"
    )
    contents = set()
    for seed in ("0", "1"):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", script, str(source), str(out)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
        contents.add((out / "model.safetensors").read_bytes())
    assert len(contents) == 1


class Headers:
    """A checkpoint of which there are only headers."""

    def __init__(self, config: Config, tensors: dict[str, TensorInfo]) -> None:
        self.config, self.tensors = config, tensors

    def where(self, name: str | None = None) -> str:
        return "headers"


def test_plans_take_time_in_proportion_to_tensors(make: Make) -> None:
    """20,000 tensors are planned and traced back in seconds, four times as long as 5,000."""
    small = Checkpoint(make("llama"))
    layer = "model.layers.0."
    seconds = []
    for layers in (555, 2222):
        tensors = {n: i for n, i in small.tensors.items() if "layers" not in n}
        for index in range(layers):
            for name, info in small.tensors.items():
                if name.startswith(layer):
                    tensors[name.replace(layer, f"model.layers.{index}.")] = info
        headers: Any = Headers(small.config | {"num_hidden_layers": layers}, tensors)
        content = {
            "source": "a",
            "output": "b",
            "steps": [{"grow": "hypercloning", "hidden": "x2"}] * 2,
        }
        started = time.process_time()
        lineage = Lineage(headers, parse_recipe(content, "recipe").plan(headers).plans)
        assert {name: lineage.origin(name) for name in tensors} == {name: name for name in tensors}
        assert all(lineage.repeatable(name) for name in tensors)
        seconds.append(time.process_time() - started)
    assert len(tensors) > 19_999
    assert seconds[1] < 10 * seconds[0] + 1
    assert seconds[1] < 20
