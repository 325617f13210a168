"""What a recipe takes, from headers or a config alone, against what a run then takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.pipeline.estimate import plan
from growkit.recipe.recipe import GrowStep
from tests.conftest import cli
from tests.hub import stand_in

Make = Callable[..., Path]


def recipe(source: Path | str, output: Path, **more: Any) -> growkit.Recipe:
    step = GrowStep("hypercloning", {"hidden": "x2"})
    return growkit.Recipe(str(source), (step,), str(output), **more)


def config_of(size: str, folder: Path) -> LlamaConfig:
    """A Llama of a published size, without weights."""
    folder.mkdir()
    hidden, ffn, layers, heads = {"70B": (8192, 28672, 80, 64), "8B": (4096, 14336, 32, 32)}[size]
    config = LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("tied", [False, True])
def test_files_are_those_that_a_run_writes(tied: bool, make: Make, tmp_path: Path) -> None:
    """From headers, and from config.json alone."""
    source = make("llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    wanted = recipe(source, tmp_path / "out", shard_size="4KB")
    found = plan(wanted)
    for weights in source.glob("*.safetensors"):
        weights.rename(tmp_path / weights.name)
    assert plan(wanted) == found
    for weights in tmp_path.glob("*.safetensors"):
        weights.rename(source / weights.name)
    result = growkit.run(wanted, verify=False)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert found["files"] == len(files)
    assert found["parameters"] == result["parameters"]
    written = sum(file.stat().st_size for file in files)
    assert result["bytes"] <= written <= found["disk_needed"]
    assert found["largest_file"] < max(file.stat().st_size for file in files)
    assert not any(tmp_path.glob("**/plan*"))


def test_a_plan_says_that_it_counts_no_optimizer(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    wanted = recipe(source, tmp_path / "out", optimizer="somewhere/optimizer.pt")
    assert any("somewhere/optimizer.pt" in each for each in plan(wanted)["warnings"])
    assert plan(recipe(source, tmp_path / "out"))["warnings"] == []


@pytest.mark.parametrize("size", ["8B", "70B"])
def test_large_models_need_no_weights(size: str, tmp_path: Path) -> None:
    config = config_of(size, tmp_path / "source")
    wanted = recipe(tmp_path / "source", tmp_path / "out")
    found = plan(wanted, bandwidth="2GB")
    with torch.device("meta"):
        small = LlamaForCausalLM(config).num_parameters()
    assert found["source_parameters"] == small
    assert found["dtype"] == "bfloat16"
    assert found["read"] == 2 * small
    assert 2 * found["parameters"] < found["disk_needed"] < 2 * found["parameters"] + 2**22
    moved = 2 * (small + found["parameters"])
    assert found["write_seconds"] >= moved / 2e9
    largest = {"8B": 30e9, "70B": 60e9}[size]  # of which a proof holds a layer in float64
    assert plan(replace(wanted, verify=None))["memory"] < 8e9 < found["memory"] < largest


def test_a_plan_and_a_dry_run_give_the_same_figures(make: Make, tmp_path: Path) -> None:
    wanted = recipe(make("llama"), tmp_path / "out")
    found, expected = plan(wanted), growkit.run(wanted, dry_run=True)["estimate"]
    for key in ("memory", "disk_needed", "write_seconds"):
        assert found[key] == expected[key]


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    config_of("8B", tmp_path / "source")
    wanted = recipe(tmp_path / "source", tmp_path / "out")
    with pytest.raises(InputError, match="bandwidth 'fast' is not understood"):
        plan(wanted, bandwidth="fast")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(InputError, match="unheard"):
        plan(wanted)


def test_the_command_fetches_no_weights(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("llama", shard_size="8KB")
    file = tmp_path / "recipe.yaml"
    steps = "steps:\n  - grow: hypercloning\n    ffn: x2\n"
    file.write_text(f"source: hf://org/small\n{steps}output: {tmp_path}/out\n")
    with stand_in(monkeypatch, tmp_path / "cache") as hub:
        commit = hub.add("org/small", source)
        done = cli("plan", file, "--json")
        assert not any(".safetensors" in each and "index" not in each for each in hub.asked)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == f"hf://org/small@{commit}"
    assert found["source_parameters"] == growkit.inspect(source)["parameters"]
    shown = cli("plan", file, "--source", source)
    assert shown.exit_code == 0
    assert "promise: exact" in shown.stdout
