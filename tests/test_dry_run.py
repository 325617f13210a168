"""A dry run shows all that a run would do, and refuses what a run refuses, in the same words."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig
from typer.testing import CliRunner

import growkit
from growkit.base.tensors import TensorInfo
from growkit.checkpoint import writing
from growkit.cli.app import app
from growkit.cli.demo import MODEL
from growkit.pipeline.estimate import estimate
from growkit.report.operation import group_names, in_common
from tests.conftest import save_model, save_random, seeded

GROW = ("--hidden", "x2")
QUICK = ("--prompts", "2", "--length", "12")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sound") / "source", "llama", num_hidden_layers=3)


@pytest.fixture
def source(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "place" / "source")


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def expanded(name: str) -> list[str]:
    """The names behind one with spans, such as ``layers.0–2,5.mlp``."""

    def numbers(part: str) -> list[str]:
        if not re.fullmatch(r"[\d,–]+", part):
            return [part]
        ends = [[int(end) for end in span.split("–")] for span in part.split(",")]
        return [str(n) for span in ends for n in range(span[0], span[-1] + 1)]

    return [".".join(parts) for parts in product(*map(numbers, name.split(".")))]


# What it shows.


def test_one_row_for_each_kind_of_tensor(source: Path, tmp_path: Path) -> None:
    shown = run("grow", source, tmp_path / "out", *GROW, "--dry-run").stdout
    plan = growkit.grow(source, tmp_path / "out", hidden="x2", dry_run=True)["plan"]
    rows = [line.split("│")[0].strip() for line in shown.splitlines() if "│" in line]
    names = [name for row in rows if "." in row for name in expanded(row)]
    assert sorted(names) == sorted(line["tensor"] for line in plan)
    assert len([row for row in rows if "." in row]) == 3 + 9  # outside of layers, and in one
    assert "model.layers.0–2.mlp.up_proj.weight" in rows


def test_experts_are_one_row(tmp_path: Path) -> None:
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    source = save_random(tmp_path / "source", MixtralConfig(**sizes, **heads))
    shown = run("grow", source, tmp_path / "out", "--ffn", "x2", "--dry-run").stdout
    assert re.search(r"model\.layers\.0–1\.\S+experts\.0–3\.w1", shown)


@pytest.mark.parametrize("seed", range(20))
def test_kinds_are_all_names_once(seed: int) -> None:
    """Whatever layers have which experts, and whatever tells some of them apart."""
    choose = seeded(seed)
    names = {
        f"layers.{layer}.{inner}": choose.choice("ab") if choose.random() < 0.2 else "a"
        for layer in range(6)
        for inner in ("norm", *(f"experts.{each}.up" for each in range(choose.choice([2, 4]))))
        if choose.random() < 0.9
    }
    names |= {"layers.01.norm": "a", "a{}.layers.1": "a"}
    found = group_names(names)
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    for shown, members in found.items():
        assert sorted(members) == sorted([shown] if "01" in shown else expanded(shown))
        assert len({names[name] for name in members}) == 1


def test_rules_that_differ_in_numbers_are_one() -> None:
    assert in_common(["rank-8 of 3.5e-1, a", "rank-6 of 3.5e-1, a"]) == "rank-… of 3.5e-1, a"
    assert in_common(["as it is"]) == "as it is"


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
    shown = run("grow", source, tmp_path / "dry", *GROW, "--dry-run").stdout
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
    options: dict[str, Any] = {
        "hidden": "x8",
        "format": layout,
        "optimizer": tmp_path / "optimizer.pt",
    }
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
    assert expected
    shown = run("grow", source, out, *GROW, "--dry-run").stdout
    assert re.search(r"disk .* MB needed, .* free", shown)
    assert re.search(r"memory .*about .* [MG]B", shown)
    assert re.search(r"time .*about .* s to write, .* s to prove \(.*2 CPU cores", shown)
    result = growkit.grow(source, out, hidden="x2", verify=False)
    assert result["estimate"] is None
    written = bytes_in(out)
    assert written <= expected["disk_needed"] < written + (5 << 18)
    assert "to prove" not in run("grow", source, out, *GROW, "--dry-run", "--no-verify").stdout

    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = run("grow", source, tmp_path / "other", *GROW, "--dry-run")
    assert done.exit_code == 0
    assert "warning: the disk has no room" in done.stdout
    assert "1 kB free" in done.stdout
    assert "are needed" in run("grow", source, tmp_path / "other", *GROW).stderr


def test_estimates_grow_with_what_they_are_of(tmp_path: Path) -> None:
    """A layer is what a proof holds, so that depth costs time and no memory."""

    class Headers:
        def __init__(self, layers: int, width: int) -> None:
            self.tensors = {
                f"layers.{n}.w": TensorInfo((width, width), "BF16") for n in range(layers)
            }

        def cuts(self, name: str) -> int:
            return 1

    def of(layers: int, width: int, **settings: Any) -> Any:
        asked = growkit.Settings(**settings)
        here: Any = Headers(layers, width)
        return estimate((here, here), tmp_path / "out", asked, 0, exact=True)

    small, deep, wide = of(10, 8000), of(20, 8000), of(10, 16000)
    assert small["memory"] == deep["memory"] < wide["memory"]
    assert small["proof_seconds"] < deep["proof_seconds"] < wide["proof_seconds"]
    assert of(10, 8000, prompts=8, length=512)["proof_seconds"] > small["proof_seconds"]


def test_rows_of_steps_that_do_nothing_say_so_once(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama")
    result = growkit.convert(source, tmp_path / "out", "gda", dry_run=True)
    assert {line["why"] for line in result["plan"]} >= {"as it is"}
    assert not any("as it is;" in line["why"] for line in result["plan"])


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
    done = run("grow", source, source.parent / "out", *GROW, "--no-verify", *more)
    assert done.exit_code == 2
    assert "LICENSE cannot be read (Permission denied)" in done.stderr


def test_what_a_run_takes_a_dry_run_takes(tmp_path: Path) -> None:
    """The control: a missing parent is made, a text that can be read is taken."""
    source = save_model(tmp_path / "words", "llama", vocab_size=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, source)
    text = tmp_path / "text.txt"
    text.write_text("A text that is long enough to be read.")
    words = [source, tmp_path / "a" / "b" / "out", *GROW, "--text", text, *QUICK]
    words += ["--report", tmp_path / "proof.html"]
    done = run("grow", *words, "--dry-run")
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "a").exists()
    done = run("grow", *words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "b" / "out" / "growkit.json").exists()
    assert load_file(tmp_path / "a" / "b" / "out" / "model.safetensors")
