"""Folders that nobody vouches for: what is in them is refused in one sentence, or does no harm."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.base.errors import LONGEST_SENTENCE, InputError
from growkit.base.parsing import parse_yaml
from growkit.engine import prompts
from tests.commands import cli, refusal
from tests.files import edit_config, edit_json, listed, with_tokenizer
from tests.models import save_model

STEERING = "a\nb\x1b[31m\u202e"


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("trust") / "sound", "llama")


@pytest.fixture
def source(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "source")
    return tmp_path / "source"


def sentence(*arguments: object) -> str:
    """What a command says that refuses; it has left nothing beside the source."""
    line = refusal(*arguments)
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


def test_a_companion_of_any_size_and_a_link_among_templates(source: Path, sound: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").symlink_to(Path(__file__))
    assert "tool.jinja leads out of the folder" in refused_by_all(source, sound)
    shutil.rmtree(source / "additional_chat_templates")
    (source / "tokenizer.json").touch()
    os.truncate(source / "tokenizer.json", 100 << 30)
    assert "tokenizer.json is larger than" in refused_by_all(source, sound)


# -- what transformers would load


@pytest.mark.parametrize(
    "name", ["shard-00001-model-00001-of-00001.safetensors", "adapter_config.json"]
)
def test_files_that_transformers_prefers(name: str, source: Path, sound: Path) -> None:
    (source / name).write_text("{}")
    assert name in refused_by_all(source, sound)
    (source / name).rename(source / f"not-{name}")  # any other of the kind does not matter
    assert cli("inspect", source).exit_code == 0


@pytest.mark.parametrize("key", ["configuration_files", "transformers_weights", "fusion_config"])
def test_keys_that_lead_elsewhere(key: str, source: Path, sound: Path) -> None:
    edit_config(source, **{key: "other.safetensors"})
    assert key in refused_by_all(source, sound)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "named",
    [
        *("../sound/model.safetensors", "/etc/passwd", "sub/model.safetensors", "model-1.bin"),
        *("model.safetensors\0", "..", "", 5, None, "y" * 10**6, f"{STEERING}.safetensors"),
    ],
)
def test_indices(named: Any, source: Path, sound: Path) -> None:
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": named}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_by_all(source, sound)
    index["weight_map"]["lm_head.weight"] = "model-1.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli("inspect", source).exit_code == 0


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


def test_deeply_nested_folders(source: Path, sound: Path) -> None:
    """Until 3.11, Python lists folders by recursion."""
    try:
        subprocess.run(["mkdir", "-p", source / "/".join("d" * 980)], check=True)
        out = source.parent / "out"
        for words in ("grow", source, out), ("verify", sound, source), ("grow", sound, source):
            assert "source are nested more than 100 deep" in sentence(*words)
        assert not out.exists()
    finally:
        subprocess.run(["rm", "-rf", source], check=True)  # pytest would delete it by recursion


def test_a_sparse_text_is_not_read_to_its_end(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 99)
    os.truncate(text, 1 << 40)
    said = sentence("grow", source, tmp_path / "out", "--hidden", "x2", "--text", text)
    assert "text.txt holds zero bytes" in said


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{n + 1}: &a{n + 1}\n  <<: [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((LAUGHS, "values"), (MERGES, "'<<'"), ("[" * 5000, "deep")),
        *(("a: " + "9" * 5000, "digits"), ("a: 0x" + "f" * 5000, "64 bits")),
        *listed("trust", "no recipes"),
    ],
    ids=lambda text: text[:12],
)
def test_yaml_that_is_no_recipe(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_yaml(text)
    (tmp_path / "recipe.yaml").write_text(text)
    assert "recipe.yaml" in sentence("run", tmp_path / "recipe.yaml")


# -- what is printed


def test_what_is_printed_of_a_folder(source: Path) -> None:
    edit_config(source, architectures=[STEERING])
    shown = cli("inspect", source).stdout
    assert r"a\nb\x1b[31m\u202e" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    printed = cli("inspect", source, "--json").stdout
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert json.loads(printed)["model_class"] == STEERING


def test_written_files_steer_no_terminal(source: Path, tmp_path: Path) -> None:
    edit_config(source, note=STEERING)
    said = ("--prompts", 1, "--length", 10, "--report", tmp_path / "report.json")
    result = cli("grow", source, tmp_path / "out", "--hidden", "x2", *said, "--json")
    assert json.loads(result.stdout)["verification"]["kept"]
    assert all(char.isprintable() or char == "\n" for char in result.stdout)
    for file in (tmp_path / "report.json", *(tmp_path / "out").glob("*.json")):
        assert all(char.isprintable() or char == "\n" for char in file.read_text("utf-8"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == STEERING


QUICK: dict[str, Any] = {"prompts": 1, "length": 10}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and the same converted with a rank that was found on a text."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8, vocab_size=256)
    with_tokenizer(source)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    options: dict[str, Any] = {"rank": "2", "shrinkage": "0.5"}
    options["calibration"] = str(folder / "text.txt")
    growkit.convert(source, folder / "shared", to="shared-diff", verify=False, **options)
    return folder


@pytest.fixture
def shared(pair: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pair / "shared", tmp_path / "shared")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("found", [{}, {"shrinkage": "0.5"}])
@pytest.mark.parametrize("rank", ["2", "auto"])
def test_a_manifest_has_no_file_read(
    rank: str, found: dict[str, str], pair: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/dev/zero`` never ends."""
    monkeypatch.setattr(prompts, "read_text", lambda *_: pytest.fail("a text was read"))
    step = {"convert": "shared-diff", "rank": rank, "calibration": "/dev/zero"} | found
    with edit_json(shared / "growkit.json") as manifest:
        manifest["recipe"]["steps"] = [step | ({"tolerance": "1"} if rank == "auto" else {})]
        manifest["recipe"] |= {"source": "/dev/zero", "output": "/dev/zero"}
        manifest["recipe"]["verify"] = {"text": "/dev/zero"}
    result = growkit.verify(pair / "source", shared, **QUICK)
    settled = rank == "2" and bool(found)
    assert (result.sections.weights.recovered is None) is not settled
    assert ("lacks the result of a search" in result["reason"]) is not settled


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"recipe": []}', b"[" * 100_000])
def test_damaged_manifests(content: bytes, pair: Path, shared: Path) -> None:
    (shared / "growkit.json").write_bytes(content)
    with pytest.raises(InputError, match=r"growkit\.json"):
        growkit.verify(pair / "source", shared, **QUICK)
