"""What a run will do and take, told before: by a dry run in full, by a plan from headers alone."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import growkit
from growkit.extras.inspection.large_plan import plan
from growkit.model.checkpoint import writing
from growkit.planning.recipe import GrowStep
from tests.commands import cli
from tests.hub import stand_in
from tests.models import Make, save_model

GROW = ("--hidden", "x2")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sound") / "source", "llama", num_hidden_layers=3)


@pytest.fixture
def source(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "place" / "source")


# What it shows.


def test_the_config_before_and_after(source: Path, tmp_path: Path) -> None:
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    differing = {key for key in before | after if before.get(key) != after.get(key)}
    found = {each["key"]: each for each in result["config"]}
    assert found.keys() == differing
    assert {"hidden_size", "intermediate_size", "num_attention_heads"} <= differing
    for key, change in found.items():
        assert json.loads(change["before"] or "null") == before.get(key)
        assert json.loads(change["after"] or "null") == after.get(key)
    loaded = AutoConfig.from_pretrained(tmp_path / "out")
    assert found["hidden_size"]["after"] == str(loaded.hidden_size)
    shown = cli("grow", source, tmp_path / "dry", *GROW, "--dry-run").stdout
    assert re.search(rf"hidden_size +│ {before['hidden_size']} +│ {after['hidden_size']}\b", shown)
    assert "vocab_size" not in shown


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_the_disk_holds_all_that_is_written(layout: str, source: Path, tmp_path: Path) -> None:
    """A large tokenizer, an optimizer's state, and what archives say of each of many tensors."""
    model = AutoModelForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (source / "tokenizer.model").write_bytes(bytes(3 << 20))
    options: dict[str, Any] = {"hidden": "x8", "format": layout}
    options["optimizer"] = tmp_path / "optimizer.pt"
    out = tmp_path / "out"
    expected = growkit.grow(source, out, dry_run=True, **options)["estimate"]
    assert expected
    result = growkit.grow(source, out, verify=False, **options)
    assert result["optimizer"]
    written = bytes_in(out)
    assert result["optimizer"]["bytes"] > 1 << 20  # more than is set aside
    assert written <= expected["disk_needed"] < written + (5 << 18)


def test_what_it_takes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    expected = growkit.grow(source, out, hidden="x2", dry_run=True)["estimate"]
    told = plan(recipe_of(source, out))
    assert all(told[key] == expected[key] for key in ("memory", "disk_needed", "write_seconds"))
    shown = cli("grow", source, out, *GROW, "--dry-run").stdout
    for line in (r"disk needed .* MB", r"memory .* [MG]B", r"write .* s", r"proof .* s"):
        assert re.search(rf"^{line}", shown, re.M)
    unproved = cli("grow", source, out, *GROW, "--dry-run", "--no-verify").stdout
    assert not re.search("^proof", unproved, re.M)
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = cli("grow", source, out, *GROW, "--dry-run")
    assert (done.exit_code, "the disk has no room" in done.stdout) == (0, True)
    assert "are needed" in cli("grow", source, out, *GROW).stderr


# What it refuses: see also tests/test_mistakes.py.


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_what_cannot_be_copied_is_told_before_anything_is_written(
    more: tuple[str, ...], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "LICENSE").write_text("mine")
    really = os.open

    def denied(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("LICENSE"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: pytest.fail("too late"))
    done = cli("grow", source, source.parent / "out", *GROW, "--no-verify", *more)
    assert done.exit_code == 2
    assert "LICENSE cannot be read (Permission denied)" in done.stderr


# What a plan tells from headers, or from a config alone.


def recipe_of(source: Path | str, output: Path, **more: Any) -> growkit.Recipe:
    step = GrowStep("hypercloning", {"hidden": "x2"})
    return growkit.Recipe(str(source), (step,), str(output), **more)


def config_of(size: str, folder: Path) -> LlamaConfig:
    """A Llama of a published size, without weights."""
    folder.mkdir()
    hidden, ffn, layers, heads = {"70B": (8192, 28672, 80, 64), "8B": (4096, 14336, 32, 32)}[size]
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("tied", [False, True])
def test_files_are_those_that_a_run_writes(tied: bool, make: Make, tmp_path: Path) -> None:
    """From headers, and from config.json alone."""
    source = make("llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    wanted = recipe_of(source, tmp_path / "out", shard_size="4KB")
    found = plan(wanted)
    moved = [file.rename(tmp_path / file.name) for file in source.glob("*.safetensors")]
    assert plan(wanted) == found
    for file in moved:
        file.rename(source / file.name)
    result = growkit.run(wanted, verify=False)
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert found["files"] == len(sizes)
    assert found["parameters"] == result["parameters"]
    assert result["bytes"] <= sum(sizes) <= found["disk_needed"]
    assert found["largest_file"] < max(sizes)


def test_a_plan_says_that_it_counts_no_optimizer(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    wanted = recipe_of(source, tmp_path / "out", optimizer="somewhere/optimizer.pt")
    assert any("somewhere/optimizer.pt" in each for each in plan(wanted)["warnings"])
    assert plan(recipe_of(source, tmp_path / "out"))["warnings"] == []


@pytest.mark.parametrize("size", ["8B", "70B"])
def test_large_models_need_no_weights(size: str, tmp_path: Path) -> None:
    config = config_of(size, tmp_path / "source")
    wanted = recipe_of(tmp_path / "source", tmp_path / "out")
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
