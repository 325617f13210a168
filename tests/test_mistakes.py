"""Hundreds of mistakes at the command line (``mistakes.txt``), and how each is answered.

Every mistake is one command in a folder of its own, with a Llama ``source`` and a DiffLlama
``diff``, both with a tokenizer, ``grown``, which ``source`` became, a text ``text.txt``, a folder
``notes`` of the user, and a recipe ``wider.yaml``. The answer must be one sentence with the mistake
and its remedy, exit code 2, within a second of computing, and nothing may be written. Only what
torch or the tokenizer must find (``late:``) may take longer.
"""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import growkit
from growkit.cli.commands import app
from growkit.model.checkpoint import writing
from tests.files import Called, edit_weights, with_tokenizer
from tests.models import save_model

MAX_SECONDS, LATE_SECONDS = 1.0, 20.0
"""Of computing, before a mistake is answered; and if libraries must be imported to find it."""

RECIPE = "source: source\nsteps:\n  - grow: hypercloning\n    ffn: x2\noutput: out\n"
SOURCE, WEIGHTS = Path("source"), Path("source/model.safetensors")
UP = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True)
class Mistake:
    """A command, and what its answer must hold.

    Attributes:
        command: as it is typed.
        named: words of the answer: what is wrong, and what would do.
        before: what is done to the folder before.
        late: only torch or the tokenizer can find it.
    """

    command: str
    named: tuple[str, ...]
    before: str = ""
    late: bool = False

    def __str__(self) -> str:
        return f"growkit {self.command} {self.before}"


def mistakes() -> list[Mistake]:
    """All that are listed."""
    found = []
    for line in Path(__file__).with_name("mistakes.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            command, _, answer = line.partition(" => ")
            named, _, before = answer.partition(" <= ")
            words, late = command.removeprefix("late: "), command.startswith("late: ")
            found.append(Mistake(words, tuple(named.split(" | ")), before, late))
    return found


# What is done to the folder before.


def change(before: str) -> None:
    """Do what a mistake needs, in the current folder."""
    for step in before.split(" ; "):
        how, _, rest = step.partition(" ")
        if how in FILES:
            FILES[how](*rest.partition(" ")[::2])
        elif how == "recipe":
            text = Path("wider.yaml").read_text()
            old, _, new = rest.encode().decode("unicode_escape").partition(" ->")
            added = f"{text}{rest[2:]}\n" if rest.startswith("+ ") else text.replace(old, new[1:])
            assert added != text
            Path("wider.yaml").write_text(added)
        elif how == "config":
            config = json.loads(Path("source/config.json").read_text()) | json.loads(rest)
            kept = {key: value for key, value in config.items() if value is not None}
            Path("source/config.json").write_text(json.dumps(kept))
        else:
            globals()[how]()


def write(name: str, content: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content.replace("\\n", "\n"))


def instead(name: str, _: str) -> None:
    """A file in place of the weights."""
    WEIGHTS.unlink()
    write(f"source/{name}", "GGUF")


def link(name: str, target: str) -> None:
    Path(name).unlink(missing_ok=True)
    Path(name).symlink_to(target)


def cut(name: str, count: str) -> None:
    data = Path(name).read_bytes()
    Path(name).unlink()
    if count:
        Path(name).write_bytes(data[: int(count)])


def model(kind: str, config: str) -> None:
    shutil.rmtree("source")
    sizes = json.loads(config)
    dtype = getattr(torch, sizes.pop("dtype", "float32"))
    save_model(SOURCE, kind, dtype=dtype, **sizes)


FILES: dict[str, Callable[[str, str], None]] = {
    **{each.__name__: each for each in (write, instead, link, cut, model)},
    "pipe": lambda name, _: os.mkfifo(name),
    "hard": lambda name, file: os.link(file, name),
}


def a_missing_tensor() -> None:
    with edit_weights(SOURCE) as found:
        del found["model.norm.weight"]


def an_extra_tensor() -> None:
    with edit_weights(SOURCE) as found:
        found["extra"] = torch.ones(3)


def another_shape() -> None:
    with edit_weights(SOURCE) as found:
        found[UP] = torch.zeros(24, 15)


def whole_numbers() -> None:
    with edit_weights(SOURCE) as found:
        found[UP] = torch.zeros(24, 16, dtype=torch.int8)


def the_head_alone() -> None:
    change('config {"tie_word_embeddings": true}')
    with edit_weights(SOURCE) as found:
        del found["model.embed_tokens.weight"]


def quantised() -> None:
    """As GPTQ stores a projection."""
    with edit_weights(SOURCE) as found:
        weight = found.pop(UP)
        name = UP.removesuffix(".weight")
        found[f"{name}.qweight"] = torch.zeros(weight.shape[1] // 8 or 1, weight.shape[0]).int()
        found[f"{name}.scales"] = torch.ones(1, weight.shape[0])


def sharded() -> None:
    """A model of two files, one of which is missing."""
    found = sorted(load_file(WEIGHTS).items())
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file(dict(found[:5]), f"source/{first}", {"format": "pt"})
    index = {name: first if number < 5 else second for number, (name, _) in enumerate(found)}
    WEIGHTS.unlink()
    Path("source/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def pickled() -> None:
    torch.save({"weight": Called(os.system, "touch exploded")}, "source/pytorch_model.bin")
    WEIGHTS.unlink()


def without_tokenizer() -> None:
    for file in Path("source").glob("tokenizer*"):
        file.unlink()


def a_pdf() -> None:
    Path("a.pdf").write_bytes(b"%PDF\xff\xfe")


def other_vocabulary() -> None:
    save_model(Path("other"), "llama", vocab_size=64)


def trained() -> None:
    """What a Trainer leaves."""
    for step in (500, 1000):
        shutil.copytree("source", f"runs/checkpoint-{step}")


def no_source() -> None:
    shutil.rmtree("source")


def make_place(folder: Path) -> None:
    """The folder in which mistakes are made."""
    sizes = {"vocab_size": 256, "intermediate_size": 24}
    with_tokenizer(save_model(folder / "source", "llama", **sizes))
    with_tokenizer(save_model(folder / "diff", "diffllama", head_dim=8, **sizes))
    (folder / "text.txt").write_text("a text of a few words, again and again. " * 40)
    (folder / "notes").mkdir()
    (folder / "notes" / "todo.txt").write_text("mine")
    (folder / "wider.yaml").write_text(RECIPE)
    with chdir(folder):
        growkit.grow("source", "grown", ffn="x2", verify=False)


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """As ``contextlib.chdir``, which Python 3.10 does not have."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# How it is answered.


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    stdout: str
    stderr: str
    seconds: float = 0.0


def faults(mistake: Mistake, folder: Path, ask: Callable[[list[str]], Answer]) -> Iterator[str]:
    """What is wrong with how a mistake is answered.

    Args:
        mistake: it.
        folder: as ``make_place`` makes it, to be used up.
        ask: runs a command in the present folder.
    """

    def contents() -> dict[Path, bytes | None]:
        return {each: each.read_bytes() if each.is_file() else None for each in Path().rglob("*")}

    with chdir(folder):
        if mistake.before:
            change(mistake.before)
        before = contents()
        answer = ask(shlex.split(mistake.command))
        untouched = contents() == before
    lines = answer.stderr.splitlines()
    if mistake.late:  # libraries may print while they are imported
        lines = [*dropwhile(lambda line: not line.startswith("error: "), lines)]
    if answer.code != 2:
        yield f"exit code {answer.code}"
    if answer.stdout:
        yield f"on stdout: {answer.stdout[:200]}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        yield f"no sentence: {answer.stderr[:400]}"
    yield from (f"does not name {word}" for word in mistake.named if word not in answer.stderr)
    if not untouched:
        yield "something was written"
    if answer.seconds > (LATE_SECONDS if mistake.late else MAX_SECONDS):
        yield f"took {answer.seconds:.2f} s"


def in_a_process(words: list[str]) -> Answer:
    """Run a command as users do; seconds are those of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "growkit", *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Answer(done.returncode, done.stdout, done.stderr, seconds)


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_answer_takes_less_than_a_second(mistake: Mistake, place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place, tmp_path / "here")
    assert [*faults(mistake, folder, in_a_process)] == []


@pytest.mark.sampled(240)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_sentence_says_what_would_do(
    mistake: Mistake, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a tensor is written; and in the same one where nothing is to be written."""
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: pytest.fail("too late"))
    folder, answers = shutil.copytree(place, tmp_path / "here"), []

    def noted(words: list[str]) -> Answer:
        answers.append(ask(words))
        return answers[-1]

    assert [*faults(mistake, folder, noted)] == []
    words = shlex.split(mistake.command)
    # What a dry run does not try; a disk without room, or an earlier output, it only warns of.
    untried = any("--overwrite" in words for words in mistake.named)
    untried |= "/proc" in mistake.command or (mistake.late and "config" in mistake.before)
    if words[0] in ("grow", "convert", "run") and not untried:
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
