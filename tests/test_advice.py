"""What ``grow`` and ``convert`` say at their end, with the law of updates as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import growkit
from tests.conftest import cli

PROVED = ["--prompts", "8", "--length", "16"]


def said(source: Path, out: Path, *options: str) -> list[str]:
    done = cli("grow", source, out, *options)
    assert done.exit_code in (0, 1), done.output
    return [line for line in done.stdout.splitlines() if line.startswith("next: ")]


@pytest.mark.parametrize("options", [["--hidden", "x2"], ["--method", "depth", "--layers", "x2"]])
def test_one_rule_for_the_rate(
    options: list[str], make: Callable[..., Path], tmp_path: Path
) -> None:
    (line,) = said(make("llama"), tmp_path / "out", *options, *PROVED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    groups = growkit.training.param_groups(model, tmp_path / "out", lr=1.0)
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    factors = {each["lr"] for each in manifest["updates"]["groups"]}
    assert {group["lr"] for group in groups} == factors
    assert "growkit.training.param_groups, which takes the source's learning rate" in line
    assert "growkit probe" in line


def test_what_comes_first_is_said_alone(make: Callable[..., Path], tmp_path: Path) -> None:
    source, quick = make("llama"), ["--hidden", "x2", "--prompts", "1", "--length", "8"]
    (few,) = said(source, tmp_path / "few", *quick)
    assert "prove it on more" in few
    twins: list[Any] = ["--hidden", "x2", "--symmetry", "keep", "--trainability"]
    (stuck,) = said(source, tmp_path / "stuck", *twins, *PROVED)
    assert "--symmetry break" in stuck
    assert not said(source, tmp_path / "dry", "--hidden", "x2", "--dry-run")
