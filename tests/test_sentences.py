"""Sentences say what is true, and a wrong name ends with the right one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import growkit
from growkit.base.errors import LONGEST_SENTENCE, InputError
from growkit.base.settings import DEVICES
from growkit.cli.commands import app
from growkit.planning.operation import operations
from growkit.planning.recipe import shipped_recipes
from tests.conftest import refusal, save_model
from tests.test_cli import HEAVY, imported_by


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sound") / "source", "llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, "source")
    return tmp_path


def test_a_folder_in_the_place_of_the_weights() -> None:
    Path("source/model.safetensors").unlink()
    Path("source/model.safetensors").mkdir()
    assert "model.safetensors is a folder, and a file was expected" in refusal("inspect", "source")


def test_a_terminal_of_no_width_is_one_of_unknown_width() -> None:
    command: list[str] = [sys.executable, "-m", "growkit", "grow", "--help"]
    environment = os.environ | {"COLUMNS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "--hidden" in done.stdout


# Which is the nearest.


# Every name there is: see also tests/mistakes.txt.


@pytest.mark.parametrize(("name", "said"), [("hi\x1b[31mden", "\\x1b"), ("h" * 10**5, "[…]")])
def test_odd_names_are_quoted_plainly(name: str, said: str) -> None:
    told = refusal("grow", "a", "b", f"--{name}", "x2")
    assert said in told
    assert told.isprintable()
    assert len(told) < LONGEST_SENTENCE + 50


def test_options_in_python() -> None:
    with pytest.raises(InputError, match=r"has no option hiden; it has .*; did you mean 'hidden'"):
        growkit.grow("source", "out", hiden="x2")
    with pytest.raises(InputError, match="for layers choose the growth method depth"):
        growkit.grow("source", "out", num_hidden_layers=8)
    with pytest.raises(InputError, match="for rank choose the conversion to mla or shared-diff"):
        growkit.grow("source", "out", rank=8)
    with pytest.raises(InputError, match="seed is '1'"):
        growkit.grow("source", "out", hidden="x2", seed="1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer is empty"):
        growkit.grow("source", "out", hidden="x2", optimizer="")


# What a shell offers.


def asked(line: str) -> dict[str, str]:
    """How bash asks what a line may go on with."""
    place = len(line.split()) - (not line.endswith(" "))
    return {"_GROWKIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(place)}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("growkit grow a b --method ", [*operations("grow")]),
        ("growkit convert a b --to diff-", ["diff-transformer", "diff-v2"]),
        ("growkit grow a b --symmetry ", ["break", "keep"]),
        ("growkit convert a b --scope ", ["head", "layer", "all_heads"]),
        ("growkit grow a b --dtype b", ["bfloat16"]),
        ("growkit verify a b --device ", [*DEVICES]),
        ("growkit run --device c", ["cpu", "cuda"]),
        ("growkit run wider-m", ["wider-mlp"]),
        ("growkit recipes show ", [*shipped_recipes()]),
        ("growkit verify ./", []),
    ],
)
def test_values_are_completed(line: str, values: list[str]) -> None:
    done = CliRunner().invoke(app, env=asked(line), prog_name="growkit")
    assert done.stdout.split() == values


def test_completion_imports_nothing_heavy() -> None:
    assert not imported_by(**asked("growkit convert a b --to dint")) & HEAVY
