"""What people get wrong at the command line is told in one sentence: a sample of all of it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from growkit.checkpoint.model_files import instead_of_weights, no_folder, no_model
from growkit.cli.app import app
from tests.mistakes import Answer, Mistake, chdir, faults, make_place, mistakes

MISTAKES = mistakes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes") / "place"
    make_place(folder)
    return folder


def ask(words: list[str]) -> Answer:
    done = CliRunner().invoke(app, words)
    return Answer(done.exit_code, done.stdout, done.stderr)


def test_there_are_hundreds() -> None:
    assert len({*MISTAKES}) == len(MISTAKES) > 200
    assert all(mistake.named for mistake in MISTAKES)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_sentence_says_what_would_do(mistake: Mistake, place: Path, tmp_path: Path) -> None:
    """And in the same one where nothing is to be written."""
    folder, answers = shutil.copytree(place, tmp_path / "here"), []

    def noted(words: list[str]) -> Answer:
        answers.append(ask(words))
        return answers[-1]

    assert [*faults(mistake, folder, noted)] == []
    words = shlex.split(mistake.command)
    numbers = "tie_word_embeddings" in mistake.before  # which a dry run does not read
    if words[0] in ("grow", "convert", "run") and not numbers:
        with chdir(folder):
            assert ask([words[0], "--dry-run", *words[1:]]) == answers[0]


def test_the_control_sees_what_is_no_mistake(place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place, tmp_path / "here")
    right = Mistake("grow source out --ffn x2 --no-verify", ("error: ",))
    assert [each.split(":")[0] for each in faults(right, folder, ask)] == [
        *("exit code 0", "on stdout", "no sentence", "does not name error", "something was written")
    ]
    slow = Answer(2, "", "error: but late\nand long", 2.0)
    told = [*faults(Mistake("inspect source", ()), folder, lambda words: slow)]
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
