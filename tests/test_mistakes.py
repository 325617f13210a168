"""What people get wrong at the command line is told in one sentence: a sample of all of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from growkit.checkpoint.model_files import instead_of_weights, no_folder, no_model
from growkit.cli.app import app
from tests.conftest import seeded
from tests.mistakes import MISTAKES, Answer, Mistake, faults, make_place

SAMPLE = seeded(0).sample(MISTAKES, 30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "place"
    make_place(folder)
    return folder


def ask(words: list[str]) -> Answer:
    done = CliRunner().invoke(app, words)
    return Answer(done.exit_code, done.stdout, done.stderr)


def found(mistake: Mistake, place: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(place, tmp_path / "here")
    return faults(mistake, tmp_path / "here", ask)


def test_there_are_a_hundred() -> None:
    assert len(MISTAKES) >= 100
    assert all(mistake.named for mistake in MISTAKES)
    assert len({(each.command, each.before, each.named) for each in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", SAMPLE, ids=str)
def test_a_sentence_says_what_would_do(mistake: Mistake, place: Path, tmp_path: Path) -> None:
    assert found(mistake, place, tmp_path) == []


def test_the_control_sees_what_is_no_mistake(place: Path, tmp_path: Path) -> None:
    right = Mistake("grow source out --ffn x2 --no-verify", ("error: ",))
    wrong = found(right, place, tmp_path)
    assert [each.split(":")[0] for each in wrong] == [
        *("exit code 0", "on stdout", "no sentence", "does not name error", "something was written")
    ]
    slow = Answer(2, "", "error: but late\nand long", 2.0)
    told = faults(replace(right, named=()), place, lambda words: slow)
    assert told == ["no sentence: error: but late\nand long", "took 2.00 s"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"),
        ("https://huggingface.co/o/m", "hf download o/m --local-dir m"),
        ("https://huggingface.co/o/m/tree/main", "hf download o/m --local-dir m"),
        ("hf.co/o/m", "hf download o/m --local-dir m"),
        ("here/m", "give a model folder"),  # the folder here exists, so m is misspelt
        ("a/b/c", "give a model folder"),
        ("nowhere", "give a model folder"),
        ("/o/m", "give a model folder"),
        ("model/config.json", "give the one that it is in, model"),
        ("here/m.gguf", "is GGUF"),
    ],
)
def test_what_is_no_folder(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model/config.json", "here/m.gguf"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    assert told in no_folder(Path(given))


def test_folders_in_which_models_lie(tmp_path: Path) -> None:
    def lies_in(name: str) -> str:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        return no_model(tmp_path)

    assert "is a model folder?" not in lies_in("first")
    assert no_model(tmp_path).endswith("such as " + str(tmp_path / "first"))
    assert lies_in("checkpoint-900").endswith("checkpoint-900")
    assert lies_in("checkpoint-1000").endswith("checkpoint-1000")
    (tmp_path / "hub" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "hub" / "snapshots" / "abc" / "config.json").touch()
    assert no_model(tmp_path / "hub").endswith("snapshots/abc")
    assert no_model(tmp_path / "first").endswith(f"is {tmp_path / 'first'} a model folder?")
    assert instead_of_weights(tmp_path / "nowhere") is None
