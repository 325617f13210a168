"""Sentences say what is true, and advise what helps."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint import publishing
from growkit.checkpoint.model_files import no_model
from growkit.cli.app import app
from tests.conftest import edit_json, save_model

GROW = "grow source out --hidden x2"
STEPS = "source: a\noutput: b\nsteps: [{grow: hypercloning, hidden: x2}]\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sound") / "source", "llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, "source")
    return tmp_path


def refused(command: str) -> str:
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2, done.output
    assert not done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_weights_without_a_config_need_that(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / name).touch()
    shard = name.removesuffix(".index.json").replace(".", "-00001-of-00002.", 1)
    (folder / shard).touch()
    assert "config.json does not exist; the weights are there, so copy it" in no_model(folder)
    (folder / name).rename(folder / "other.safetensors")  # the control
    assert "copy it from the model" not in no_model(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("? [1, 2]\n: 3\n", "line 4, column 3: key that holds a sequence is no text"),
        ("? {a: 1}\n: 3\n", "key that holds a mapping is no text"),
        ("1: 3\n", "cannot be used: line 4, column 1: key '1' is no text"),
        ("seed: .nan\n", "cannot be used: line 4, column 7: .nan; a finite number"),
        ("verify: {max_kl: .inf}\n", ".inf; a finite number was expected"),
        ("verify: {max_kl: [-.inf]}\n", "column 19: -.inf; a finite number was expected"),
        ("seed: 99999999999999999999\n", "column 7: 99999999999999999999; a number that fits into"),
        ("seed: true\n", "is true; a whole number was expected"),
        ("dtype: null\n", "dtype in r.yaml is null; text was expected"),
        ("verify: {trainability: 1}\n", "is 1; true or false was expected"),
        ("dtype: a\0b\n", "cannot be used: unacceptable character #x0000"),
        ("seed: [\n", "cannot be used"),
    ],
)
def test_recipes(text: str, told: str) -> None:
    Path("r.yaml").write_text(STEPS + text)
    said = refused("run r.yaml")
    assert told in said
    assert "Node(" not in said


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("true", "step 1 of r.yaml: hidden is True; "),
        ("null", "hidden in step 1 of r.yaml is null"),
    ],
)
def test_values_of_options(value: str, told: str) -> None:
    Path("r.yaml").write_text(STEPS.replace("x2", value))
    assert told in refused("run r.yaml")


@pytest.mark.parametrize("more", ["", "--dry-run"])
@pytest.mark.parametrize("dtype", ["", "int8"])
def test_no_dtype_is_one_too(dtype: str, more: str) -> None:
    words = [*f"{GROW} {more}".split(), f"--dtype={dtype}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    told = f"dtype {dtype!r} is not known; choose one of float64, float32, bfloat16, float16"
    assert done.stderr.startswith(f"error: {told}\n")  # float8 would be refused


def test_what_is_empty_in_python_and_in_recipes() -> None:
    with pytest.raises(InputError, match="dtype '' is not known"):
        growkit.grow("source", "out", hidden="x2", dtype="")
    with pytest.raises(InputError, match="optimizer is empty"):
        growkit.grow("source", "out", hidden="x2", optimizer="")
    steps = STEPS.replace("source: a", "source: source").replace("output: b", "output: out")
    Path("r.yaml").write_text(f"{steps}dtype: ''\n")
    assert "dtype '' is not known" in refused("run r.yaml")
    Path("r.yaml").write_text(steps)
    assert CliRunner().invoke(app, ["run", "r.yaml", "--dry-run"]).exit_code == 0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("grow source out --hidden x2.0000001", "would make hidden 32.0000016; "),
        ("grow source out --hidden x1.03", "would make hidden 16.48; "),
        ("grow source out --hidden 99999999999999999999", "is not understood; "),
        ("grow source out --hidden x99999999999999999999", "is not understood; "),
        ("run source", "source holds no growkit.json"),
        (f"{GROW} --text source", "text source is a folder, and a file was expected"),
        (f"{GROW} --text blank", "text blank holds blanks alone"),
        (f"{GROW} --text empty", "text empty is empty"),
        (f"grow source {'o' * 260} --hidden x2", "its name is too long; choose a shorter one"),
        (f"{GROW} --seed nan", "--seed takes a whole number; "),
        (f"{GROW} --max-kl lots", "--max-kl takes a number; "),
        (f"{GROW} --optimizer nosuch", "does not exist; check its name"),
        (f"{GROW} --report out/a/b.html", "is not a folder; make it"),
        (f"{GROW} --report out/a.html", "is not a folder; make it before a report goes there"),
        (f"{GROW} --report a/b.html", "a is not a folder; make it before a report goes there"),
        ("inspect hf://", "hf:// is no address of a model on the Hub"),
        ("inspect s3://x/y", "s3://x/y is not a folder"),
    ],
)
def test_command_lines(command: str, told: str) -> None:
    Path("blank").write_text(" \n\t\n")
    Path("empty").touch()
    assert told in refused(command)


def test_a_folder_in_the_place_of_the_weights() -> None:
    Path("source/model.safetensors").unlink()
    Path("source/model.safetensors").mkdir()
    assert "model.safetensors is a folder, and a file was expected" in refused("inspect source")


@pytest.mark.parametrize("value", [0, "64"])
def test_a_config_is_named_by_its_folder(value: Any) -> None:
    with edit_json(Path("source/config.json")) as config:
        config["hidden_size"] = value
    assert refused("inspect source").startswith("error: source is no such model: config.json ")


@pytest.mark.parametrize(
    "take",
    [
        lambda: Path("out").touch(),
        lambda: (Path("out").mkdir(), Path("out/mine").touch()),
        lambda: os.symlink("nowhere", "out"),
        lambda: os.symlink("out", "out"),
    ],
)
def test_overwriting_is_advised_where_it_helps(take: Callable[[], object]) -> None:
    take()
    assert "out already exists; choose another name\n" in refused(GROW)
    assert "not overwritten" in refused(f"{GROW} --overwrite")


def test_overwriting_is_advised_in_both_languages() -> None:
    assert CliRunner().invoke(app, [*GROW.split(), "--no-verify"]).exit_code == 0
    assert "(--overwrite, in Python overwrite=True)" in refused(GROW)
    assert CliRunner().invoke(app, [*GROW.split(), "--no-verify", "--overwrite"]).exit_code == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_small_files_are_named_where_they_cannot_be_written(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publishing, "flush", full)
    said = refused("recipes copy wider-mlp .")
    assert "wider-mlp.yaml" in said
    assert "Errno" not in said
    assert not Path("wider-mlp.yaml").exists()


def test_whatever_the_system_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "source/config.json")

    monkeypatch.setattr("growkit.pipeline.inspection.inspect", look)
    assert "error: source/config.json: Input/output error; " in refused("inspect source")


@pytest.mark.parametrize("columns", ["0", "80"])
def test_a_terminal_of_no_width_is_one_of_unknown_width(columns: str) -> None:
    command: list[str] = [sys.executable, "-m", "growkit", "grow", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"COLUMNS": columns}
    )
    assert done.returncode == 0
    assert "--hidden" in done.stdout
