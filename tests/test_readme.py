"""Every command and program in the documents runs, and prints what they show.

Fenced blocks are ``sh`` (a command per line), ``python`` (a program), ``yaml`` (a recipe, or a
family) or ``text`` (output; a line of ``…`` stands for omitted lines). Commands in running text run
too. A block that begins with ``# path/of/a/file.py`` (or ``.yaml``) quotes that file instead. Each
block runs in a folder of its own, with these names:

- ``SRC``: a model, with differential attention where the line needs it;
- ``OUT``: nothing yet, or a model made from ``SRC`` where the line reads it;
- ``my-llama``: a Llama with a tokenizer; ``my-larger-llama``: the same, grown;
- ``my-arcee``, ``tiny``: an Arcee and a Qwen3; ``TEXT`` and ``some-text.txt``: a text;
- ``logits.safetensors``: logits of ``SRC``;
- ``NAME``: a name that fits; ``RECIPE.yaml``, ``grow.yaml``: recipes.

Proofs are smaller than by default. What installs something, needs a network or takes minutes
(``make``, ``hf``, ``benchmarks/``) is looked up, not run.
"""

import contextlib
import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import growkit
from growkit.cli.commands import app
from growkit.cli.demo import MODEL, held_out_text
from growkit.model.families.family import described, families
from growkit.planning.recipe import shipped_recipe
from tests import motif3_reference, reference
from tests.files import listed, with_tokenizer
from tests.models import save_model
from tests.quantised import quantise
from tests.test_motif3 import random_model
from tests.test_program_logits import as_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {file.name: file.read_text("utf-8") for file in DOCUMENTS}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:growkit|make|python|pip|uvx)\s[^`]+)`")
FILE = re.compile(r"`((?:growkit|tests|docs|benchmarks|examples)/[a-z][\w./-]*)`")
NAMED = re.compile(r"((?:`\w+`(?:, | and )?)+) in `(\S+/\S+\.py)`")
ROOMS = {f"{each.parent.name}/" for each in (ROOT / "growkit").glob("*/__init__.py")}
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
DIFFERENTIAL = {"group-diff", "shared-diff", "motif"}
LANGUAGES = {"sh", "python", "text", "yaml"}
QUOTED = re.compile(r"# (\S+\.(?:py|yaml))\n")
SMALL = {name: {"prompts": 1, "length": 24} for name in ("grow", "convert", "shrink", "verify")}
SMALL["probe"] = {"steps": 1, "seeds": 2, "batch": 1, "length": 2}
"""Smaller defaults of commands."""

GROWN: dict[str, dict[str, Any]] = {
    "experts": {"method": "upcycle", "experts": 2},
    "shrink": {"hidden": "x2"},
    "unused": {"method": "depth", "layers": "x2"},
}
"""Words of commands whose source is grown, and how."""

ELSEWHERE = {
    "growkit demo": "test_cli",
    "growkit families --all": "test_catalogue",
    "growkit verify SRC MODEL.gguf": "test_formats",
    "growkit verify SRC MERGED --adapter ADAPTER": "test_adapters",
}
"""Commands that run in another file of tests."""

OTHER_SOURCES = {"mla": "wide", "linear_attention": "linear", "group-diff-8-2-motif-3": "motif-3"}
"""Sources of commands, by a word in them."""


@dataclass(frozen=True)
class Block:
    """A fenced block, or a command in running text."""

    document: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {self.text.strip().splitlines()[0][:60]}"

    def commands(self) -> Iterator[list[str]]:
        """The words of every command, without comments."""
        for line in self.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks_of(document: str, text: str) -> list[Block]:
    found = [Block(document, language, inside) for language, inside in FENCED.findall(text)]
    assert all(block.language in LANGUAGES for block in found), document
    inline = (" ".join(each.split()) for each in INLINE.findall(FENCED.sub("", text)))
    return found + [Block(document, "sh", each) for each in dict.fromkeys(inline)]


BLOCKS = [block for name, text in PAGES.items() for block in blocks_of(name, text)]


def of(language: str) -> list[Block]:
    """Blocks of a language; equal blocks once."""
    found = [block for block in BLOCKS if block.language == language]
    return list({block.text.strip(): block for block in reversed(found)}.values())[::-1]


def source_of(words: list[str]) -> str:
    """The name of the source that a command can read."""
    for word, name in OTHER_SOURCES.items():
        if word in words:
            return name
    if "shared-diff" in words or "run" in words:
        return "low-rank"
    return "diff" if DIFFERENTIAL.intersection(words) else "my-llama"


class Workplace:
    """The folder in which a block runs."""

    def __init__(self, models: Path) -> None:
        self._models = models
        Path("TEXT").write_text(held_out_text()[:200], encoding="utf-8")
        shutil.copy("TEXT", "some-text.txt")
        for name in ("my-llama", "my-arcee", "tiny"):
            shutil.copytree(models / name, name)

    def prepare(self, words: list[str]) -> list[str]:
        """Make what a command reads, and fill in NAME."""
        assert "…" not in " ".join(words), f"{words} is no command"
        made = any(word.startswith("OUT/") for word in words) or any(
            {each, "OUT"} <= {*words} for each in ("verify", "check")
        )
        for name in ("SRC", "OUT"):
            shutil.rmtree(name, ignore_errors=True)
        if "SRC" in words or made:
            shutil.copytree(self._models / source_of(words), "SRC")
        for word in (word for word in GROWN if word in words):
            shutil.rmtree("SRC")
            growkit.grow("my-llama", "SRC", verify=False, **GROWN[word])
        if "dense-weights" in words:
            quantise(Path("SRC"))
        if "run" in words and made:
            growkit.convert("SRC", "OUT", "shared-diff", rank="auto", energy=0.9, verify=False)
        elif made:
            growkit.grow("SRC", "OUT", hidden="x2", verify=False)
        if "logits.safetensors" in words:
            as_run(Path("SRC"), Path("logits.safetensors"), "float32")
        if "RECIPE.yaml" in words:
            shutil.copy(shipped_recipe("wider-mlp"), "RECIPE.yaml")
            shutil.copytree(self._models / "my-llama", "source")
        if "grow.yaml" in words:
            block = next(each for each in of("yaml") if each.document == "README.md")
            Path("grow.yaml").write_text(block.text, encoding="utf-8")
        name = "wider-mlp" if "recipes" in words else "diff-v2"
        return [name if word == "NAME" else word for word in words]

    def run(self, words: list[str]) -> str:
        """Run a command; it must succeed."""
        program, *arguments = words
        file = arguments.pop() if ">" in arguments[-2:] else None
        if " ".join(words) in ELSEWHERE:
            return ""
        if program == "growkit":
            given = arguments[:-1] if file else arguments
            sizes = {} if "--logits" in given else SMALL  # of which the file has its own
            done = CliRunner().invoke(app, self.prepare(given), default_map=sizes)
            assert done.exit_code == 0, f"{' '.join(words)}: {done.output}"
            if file:
                Path(file).write_text(done.stdout, encoding="utf-8")
            return done.stdout
        if program == "make":
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(), words
        elif arguments[-2:] == ["-m", "growkit"]:
            pass  # see tests/test_trust.py
        elif program == "hf":
            installed = Path(sys.executable).with_name("hf")
            done = subprocess.run([installed, arguments[0], "--help"], capture_output=True)
            assert done.returncode == 0, words
        elif arguments[:2] == ["-m", "pytest"]:
            files = [word for word in arguments[2:] if word.startswith("tests/")]
            assert files, words
            assert all((ROOT / file).is_file() for file in files), words
        elif program == "python" and arguments[0] == "-m":
            module = ROOT / arguments[1].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
        elif program in ("python", "accelerate", "torchrun"):
            files = [word for word in arguments if word.startswith(("examples/", "benchmarks/"))]
            assert files, words
            assert all((ROOT / file).is_file() for file in files), words
        else:
            assert (program, *arguments[-2:]) == ("uvx", "growkit", "demo") or (
                words[:2] == ["pip", "install"]
                and words[2] in {".", "torch", "accelerate", "pre-commit", "growkit[gguf]"}
            ), f"nobody knows how to run {words}"
        return ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, with the byte tokenizer of the demo."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 256, "intermediate_size": 32, "max_position_embeddings": 512}
    rows = {"vocab_size": 264}  # more than the tokenizer uses
    save_model(folder / "my-llama", "llama", num_hidden_layers=1, **(sizes | rows))
    save_model(folder / "diff", "diffllama", **sizes)
    wide = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 24}
    save_model(folder / "low-rank", "diffllama", **(sizes | wide))
    heads = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    save_model(folder / "wide", "llama", num_hidden_layers=1, **(sizes | heads))
    save_model(folder / "linear", "qwen3_5_text", **sizes)
    random_model(folder / "motif-3", motif3_reference.TINY | {"vocab_size": 256})
    for kind in ("my-llama", "diff", "low-rank", "wide"):
        with_tokenizer(folder / kind)
    save_model(folder / "tiny", "qwen3", num_hidden_layers=1)
    save_model(folder / "my-arcee", "arcee", num_hidden_layers=1)
    return folder


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(tmp_path)
    return Workplace(models)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_run_as_printed(block: Block, workplace: Workplace) -> None:
    for words in block.commands():
        workplace.run(words)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings(  # of torch and peft, on any machine without a GPU
    "ignore:'pin_memory' argument:UserWarning",
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:torch.distributed is disabled:UserWarning",
)
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_snippets_run_as_printed(block: Block, workplace: Workplace) -> None:
    if is_quoted(block):
        return
    for module in needed(block.text):
        pytest.importorskip(module)
    if "my-larger-llama" in block.text and "import growkit" not in block.text:
        growkit.grow("my-llama", "my-larger-llama", hidden="x2", verify=False)
    with contextlib.redirect_stdout(None):
        exec(compile(block.text, str(block), "exec"), {})


def is_quoted(block: Block) -> bool:
    """Whether a block is a part of the file that it names; nothing else may be named."""
    quoted = QUOTED.match(block.text)
    assert not quoted or block.text[quoted.end() :] in (ROOT / quoted[1]).read_text("utf-8")
    return bool(quoted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_recipes_run_as_printed(block: Block, workplace: Workplace) -> None:
    """A description of a family is one that growkit takes."""
    if is_quoted(block):
        return
    if block.text.startswith("family:"):
        assert described(yaml.safe_load(block.text), str(block)).tensors
        return
    Path("printed.yaml").write_text(block.text, encoding="utf-8")
    workplace.run(["growkit", "run", "printed.yaml"])


def needed(program: str) -> set[str]:
    """Modules that a program imports, and accelerate for transformers' Trainer."""
    modules = set(re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE))
    return modules | ({"accelerate"} if "Trainer(" in program else set())


# Output.


@functools.cache
def demo() -> str:
    """The demo, on a CPU as in the documents."""
    return CliRunner().invoke(app, ["demo"]).stdout


def fault() -> str:
    """The verdict on the demo's model after one matrix was multiplied by 1.01."""
    Path("TEXT").write_text(held_out_text(), encoding="utf-8")
    growkit.grow(MODEL, "FAULTY", method="group-diff", hidden="x2", signal_heads="x4", verify=False)
    weights = load_file("FAULTY/model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"] *= 1.01
    save_file(weights, "FAULTY/model.safetensors", metadata={"format": "pt"})
    verify = ["verify", str(MODEL), "FAULTY", "--text", "TEXT"]
    done = CliRunner().invoke(app, verify, default_map={"verify": {"prompts": 3}})
    assert done.exit_code == 1
    return done.stdout


PRINTED: dict[str, Callable[[], str]] = {"771,456": demo, "not": fault}
"""What makes the output of a block, by its first word."""


def alike(expected: str, found: str) -> bool:
    """Whether output is as expected, except for line breaks and the noise of measured numbers.

    A line of ``…`` stands for any text.
    """
    pieces = [plain(piece) for piece in re.split(r"^…$", expected, flags=re.MULTILINE)]
    number = f"({NUMBER.pattern})"
    pattern = ".*?".join(
        number.join(re.escape(words) for words in NUMBER.split(piece)) for piece in pieces
    )
    match = re.search(pattern if len(pieces) > 1 else f"^{pattern}$", plain(found))
    numbers = (each for piece in pieces for each in NUMBER.findall(piece))
    return match is not None and all(
        near(*pair) for pair in zip(numbers, match.groups(), strict=True)
    )


def plain(text: str) -> str:
    """Words without line breaks and the lines of tables."""
    return " ".join(re.sub(r"[─━╇┃│]+", " ", text).split())


def near(one: str, other: str) -> bool:
    """Whether whole numbers are equal, measured ones within 30 %, or both are float64 rounding."""
    measured = any(mark in one + other for mark in ".e")
    a, b = (float(each.replace(",", "")) for each in (one, other))
    return one == other or (measured and (max(a, b) < 1e-6 or b == pytest.approx(a, rel=0.3)))


@pytest.mark.sampled(0)
@pytest.mark.usage
@pytest.mark.parametrize("block", of("text"), ids=str)
def test_what_is_printed_is_what_comes_out(
    block: Block, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    found = PRINTED[block.text.split()[0]]()
    assert alike(block.text, found), found


# Names.


def options_of(command: typer.core.TyperGroup) -> set[str]:
    known = {name for each in command.params for name in each.opts}
    for each in command.commands.values():
        if isinstance(each, typer.core.TyperGroup):
            known |= options_of(each)
        for parameter in each.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    return known


def unknown_options(text: str) -> set[str]:
    group = typer.main.get_command(app)
    others = r"(python -m tests\.|pytest |accelerate launch |torchrun |pip |hf |uvx )[^`\n]*"
    ours = re.sub(others, "", text)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    return named - options_of(group) - {"--help"}


def table(page: str, heading: str) -> list[str]:
    """The first cells of the rows under a heading."""
    text = PAGES[page]
    rows = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


def test_all_commands_are_in_the_table() -> None:
    group = typer.main.get_command(app)
    named = [cell.split()[1].rstrip("`") for cell in table("reference.md", "| command | purpose |")]
    assert {*named} == {*group.commands}


def test_the_reference_is_that_of_the_command_line() -> None:
    """``python -m tests.reference`` writes it."""
    assert PAGES["reference.md"].endswith(reference.options())
    assert len(reference.commands()) > 5
    assert "| `--hidden xN\\|SIZE` | Hidden size. |" in reference.options()


def test_all_families_are_in_the_table() -> None:
    named = table("families.md", "| family | `model_type` |")
    assert sorted(named) == sorted(family.name for family in families().values())


def missing(text: str) -> set[str]:
    """Files that a text names and that are not there, and names that are not in their file."""
    gone = {
        file for file in FILE.findall(text) if not (ROOT / file).exists() and "NAME" not in file
    }
    cells = re.findall(r"^\| (`\w+/`.*?) \|", text, re.MULTILINE)
    gone |= {room for cell in cells for room in re.findall(r"`([^`]+)`", cell)} - ROOMS
    for names, file in NAMED.findall(" ".join(text.split())):
        known = (ROOT / file).read_text("utf-8")
        gone |= {name for name in re.findall(r"\w+", names) if name not in known}
    return gone


def test_all_rooms_are_in_the_table() -> None:
    named = re.findall(r"`(\w+/)`", " ".join(table("CONTRIBUTING.md", "| room | contents |")))
    assert sorted(named) == sorted(ROOMS)
    rows = PAGES["CONTRIBUTING.md"].split("| to change |")[1].split("\n\n")[0].splitlines()[2:]
    files = [name for row in rows for name in re.findall(r"`([\w./]+)`", row.split(" | ")[1])]
    known = [f"/{path.relative_to(ROOT)}" for path in (ROOT / "growkit").rglob("*")]
    assert len(files) > len(rows) > 9
    assert [
        name for name in files if not any(k.endswith(f"/{name}".rstrip("/")) for k in known)
    ] == []


def anchors(text: str) -> set[str]:
    """Anchors of all headings."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(document: Path, text: str) -> list[str]:
    dead = []
    for link in LINK.findall(FENCED.sub("", text)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        there = file.exists() and (not anchor or anchor in anchors(file.read_text("utf-8")))
        dead += [] if there else [link]
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_options_files_and_links_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    assert not unknown_options(text)
    assert not missing(text)
    assert not dead_links(document, text)


# Controls: faults are noticed.


@pytest.mark.parametrize("line", listed("readme", "broken commands"))
def test_a_broken_command_is_noticed(line: str, workplace: Workplace) -> None:
    (block,) = blocks_of("here", f"```sh\n{line}\n```\n")
    with pytest.raises(AssertionError):
        workplace.run(next(block.commands()))


def test_other_faults_are_noticed() -> None:
    with pytest.raises(AssertionError):
        blocks_of("here", "```\ngrowkit demo\n```\n")
    assert [block.text for block in blocks_of("here", "so `growkit\ndemo` it")] == ["growkit demo"]
    assert unknown_options("`--hiden` and --json") == {"--hiden"}
    assert needed("import torch\nfrom peft import x\nTrainer()") == {"torch", "peft", "accelerate"}
    name = "x" * 9
    text = f"| `nothing/` | x |\n\n`growkit/no.py`; `{name}`, `PAGES` in\n`tests/test_readme.py`"
    assert missing(text) == {name, "growkit/no.py", "nothing/"}
    text = "[a](nothing.md), [b](#nothing), [c](docs/explanation/numerics.md#the-law), [d](LICENSE)"
    assert dead_links(DOCUMENTS[0], text) == ["nothing.md", "#nothing"]
    printed = "loss 1.178, 8 windows, off by 1e-14"
    assert alike(printed, "loss 1.2, 8\nwindows, off by 3.1e-15")
    for right, wrong in (("1.178", "2.178"), (" 8", " 9"), ("loss", "gain"), ("1e-14", "1e-2")):
        assert not alike(printed, printed.replace(right, wrong, 1))
    assert alike("one 8 …\n…\nthree 1.2", "zero one 8 … two three 1.3 four")
    for wrong in ("three 1.3 one 8", "one 9 two three 1.2", "one 8 two three 4.2"):
        assert not alike("one 8\n…\nthree 1.2", wrong)
