"""Folders that nobody vouches for: what is in them is refused in one sentence, or does no harm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import growkit
from growkit.base.errors import LONGEST_SENTENCE, InputError
from growkit.base.parsing import parse_yaml
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import Checkpoint
from growkit.cli.app import app
from growkit.engine import texts
from tests.conftest import save_model

STEERING = "a\nb\x1b[31m\u202e"


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("trust") / "sound", "llama")


@pytest.fixture
def source(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "source")
    return tmp_path / "source"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sentence(*arguments: object) -> str:
    """What a command says that refuses; it has left nothing beside the source."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < LONGEST_SENTENCE + 50
    return line


def refused_by_all(source: Path, sound: Path) -> str:
    """What ``inspect``, ``grow`` and ``verify`` say, all the same."""
    out = source.parent / "out"
    before = sorted(source.parent.rglob("*"))
    said = {
        sentence("inspect", source),
        sentence("grow", source, out, "--hidden", "x2"),
        sentence("verify", source, sound),
        sentence("verify", sound, source),
    }
    assert sorted(source.parent.rglob("*")) == before
    assert len(said) == 1, said
    return said.pop()


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


# -- links and what is no file


LINKS: dict[str, Callable[[Path], Any]] = {
    "a secret": lambda path: path.symlink_to(Path(__file__)),
    "nowhere": lambda path: path.symlink_to("no-such-blob"),
    "itself": lambda path: path.symlink_to(path.name),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "its parent": lambda path: path.symlink_to(".."),
    "a pipe": os.mkfifo,
}
FILES = ("tokenizer.json", "config.json", "model.safetensors", "LICENSE", "modeling_own.py")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", LINKS)
def test_links_and_pipes(kind: str, name: str, source: Path, sound: Path) -> None:
    (source / name).unlink(missing_ok=True)
    LINKS[kind](source / name)
    assert name in refused_by_all(source, sound)


def test_links_in_a_folder_that_is_carried_along(source: Path, sound: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").symlink_to(Path(__file__))
    assert "tool.jinja leads out of the folder" in refused_by_all(source, sound)


def test_a_folder_of_a_hub_cache(source: Path, tmp_path: Path) -> None:
    """Its files are links to blobs beside it; links inside of a folder are followed as well."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(source.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "LICENSE").write_text("terms")
    (snapshot / "LICENSE.txt").symlink_to("LICENSE")
    (tmp_path / "link").symlink_to(snapshot)
    result = growkit.grow(tmp_path / "link", tmp_path / "out", hidden="x2", verify=False)
    assert result["parameters"] > result["source_parameters"]
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "terms"
    assert not (tmp_path / "out" / "LICENSE.txt").is_symlink()
    (blobs / "9").write_text("")
    (snapshot / "tokenizer.json").symlink_to("../../../models--x/blobs/9")
    assert Folder(snapshot).find("tokenizer.json")
    (snapshot / "vocab.json").symlink_to("../../blobs/10")
    with pytest.raises(InputError, match=r"vocab\.json is a link that leads nowhere"):
        Checkpoint(snapshot)


def test_a_companion_of_any_size(source: Path, sound: Path) -> None:
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate(100 << 30)
    assert "tokenizer.json is larger than" in refused_by_all(source, sound)


# -- what transformers would load


@pytest.mark.parametrize(
    "name", ["shard-00001-model-00001-of-00001.safetensors", "adapter_config.json"]
)
def test_files_that_transformers_prefers(name: str, source: Path, sound: Path) -> None:
    (source / name).write_text("{}")
    assert name in refused_by_all(source, sound)
    (source / name).rename(source / f"not-{name}")  # any other of the kind does not matter
    assert run("inspect", source).exit_code == 0


@pytest.mark.parametrize("key", ["configuration_files", "transformers_weights", "fusion_config"])
def test_keys_that_lead_elsewhere(key: str, source: Path, sound: Path) -> None:
    edit_config(source, **{key: "other.safetensors"})
    assert key in refused_by_all(source, sound)


@pytest.mark.parametrize(
    "listed",
    [
        *("../sound/model.safetensors", "/etc/passwd", "sub/model.safetensors", "model-1.bin"),
        *("model.safetensors\0", "..", "", 5, None, "y" * 10**6, f"{STEERING}.safetensors"),
    ],
)
def test_indices(listed: Any, source: Path, sound: Path) -> None:
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": listed}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_by_all(source, sound)
    index["weight_map"]["lm_head.weight"] = "model-1.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("inspect", source).exit_code == 0


# -- there is an end to everything


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1, "a": 2}', "[" * 10**6, '{"a":' * 10**5, "null", "[]", "", "\x00", "x" * 10**7),
        *('{"a": NaN}', '{"a": 1e400}', '{"a": 1%s}' % ("0" * 10**6), '{"a": "\\ud800"}'),
        "{" + ",".join(f'"{number}":[]' for number in range(1_000_001)) + "}",
    ],
    ids=lambda text: text[:12],
)
def test_configs_that_are_no_json(text: str, source: Path, sound: Path) -> None:
    (source / "config.json").write_text(text)
    assert "config.json" in refused_by_all(source, sound)


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_hidden_layers": 10**9}, {"hidden_size": 10**18}, {"hidden_size": 10**17}),
        *({"vocab_size": 10**17}, {"num_attention_heads": 10**17}, {"head_dim": 10**17}),
        *({"model_type": "y" * 10**7}, {"model_type": STEERING}, {"hidden_size": "y" * 10**7}),
        {"intermediate_size": [10**17] * 1000},
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_sizes_of_configs(changes: dict[str, Any], source: Path) -> None:
    edit_config(source, **changes)
    sentence("inspect", source)
    sentence("grow", source, source.parent / "out", "--hidden", "x2")


def test_large_texts_are_read_in_part(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    with file.open("wb") as stream:
        stream.write("é".encode() * texts.MOST_TEXT)
        stream.truncate(100 << 30)
    content = texts.read_text(str(file))
    assert len(content) == texts.MOST_TEXT
    assert len(texts.documents(b"x" * 10**6)) == -(-(10**6) // texts.LONGEST_DOCUMENT)
    words = "two words " * 10**5
    parts = texts.documents(f"{words}<|endoftext|> short ".encode())
    assert " ".join(parts) == f"{words}short"
    assert max(map(len, parts)) <= texts.LONGEST_DOCUMENT


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{n + 1}: &a{n + 1}\n  <<: [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((LAUGHS, "values"), (MERGES, "'<<'"), ("a: 1\na: 2", "'a' appears twice")),
        *(("a: &a [*a]", "deep"), ("[" * 5000, "deep"), ("1: 2", "no text"), ("yes: 1", "no text")),
        *(
            ("a: 0x" + "f" * 5000, "64 bits"),
            ("a: .nan", "a finite number"),
            ("a: !!set {b}", "tag"),
        ),
        *(("a: " + "9" * 5000, "digits"), ("a: !!python/object/apply:os.system [ls]", "tag")),
        *(("a: !!timestamp x", "group"), ("a: !!map [1]", "unpack"), ("a: !!int ''", "range")),
        ("\x00", "x00"),
    ],
    ids=lambda text: text[:12],
)
def test_yaml_that_is_no_recipe(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_yaml(text)
    (tmp_path / "recipe.yaml").write_text(text)
    assert "recipe.yaml" in sentence("run", tmp_path / "recipe.yaml")


# -- what is printed


def test_sentences_steer_no_terminal_and_have_an_end() -> None:
    assert str(InputError(f"tensor {STEERING} is ×2 “große”")) == (
        r"tensor a\nb\x1b[31m\u202e is ×2 “große”"
    )
    long = str(InputError("begin " + "x" * 10**7 + " end"))
    assert len(long) < LONGEST_SENTENCE + 10
    assert long.startswith("begin x")
    assert long.endswith("x end")


def test_what_is_printed_of_a_folder(source: Path) -> None:
    edit_config(source, architectures=[STEERING])
    shown = run("inspect", source).stdout
    assert r"a\nb\x1b[31m\u202e" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    printed = run("inspect", source, "--json").stdout
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert json.loads(printed)["model_class"] == STEERING


# -- modules in the current folder


CANARIES = ("typing", "dataclasses", "json", "typer", "yaml", "torch", "__future__", "pathlib")


@pytest.fixture
def trapped(source: Path) -> Path:
    for name in CANARIES:
        (source / f"{name}.py").write_text(f"import os; os.write(2, b'{name} was run')\n")
    return source


def test_modules_in_the_current_folder(trapped: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(growkit.__file__).parents[1])}
    command = [sys.executable, "-m", "growkit", "inspect", "."]
    looked = subprocess.run(
        command, cwd=trapped, env=environment, capture_output=True, text=True, check=False
    )
    assert (looked.returncode, looked.stderr) == (0, "")
    assert "Llama" in looked.stdout
    control = subprocess.run(
        [sys.executable, "-m", "yaml"], cwd=trapped, capture_output=True, text=True, check=False
    )
    assert "yaml was run" in control.stderr
