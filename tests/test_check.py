"""``growkit check``: a folder is what its manifest recorded, on any later day and in any copy."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.model.checkpoint.publishing import write_json
from tests.commands import cli
from tests.files import flip_bit
from tests.models import save_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    source = save_model(place / "source", "llama")
    growkit.grow(source, place / "out", ffn="x2", verify=False, shard_size="20KB")
    return place / "out"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def checked(folder: Path, *options: str) -> tuple[int, str]:
    result = cli("check", folder, *options)
    return result.exit_code, result.output


def found(folder: Path) -> dict[str, str]:
    code, said = checked(folder, "--json")
    result = json.loads(said)
    assert code == (0 if result["whole"] else 1)
    assert result["whole"] == (not result["differences"])
    assert ("not intact" in result["reason"]) != result["whole"]
    return {each["file"]: each["what"] for each in result["differences"]}


def test_the_hashes_are_those_of_another_program(copy: Path) -> None:
    """The judge is sha256sum."""
    code, said = checked(copy)
    assert (code, said.count("\n")) == (0, 1)
    assert said.startswith("intact: ")
    recorded = json.loads((copy / "growkit.json").read_text())["files"]
    lines = "".join(f"{digest}  {name}\n" for name, (_, digest) in recorded.items())
    subprocess.run(["sha256sum", "--check", "--quiet"], input=lines.encode(), cwd=copy, check=True)
    assert len(recorded) == len(list(copy.iterdir())) - 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (flip_bit, "changed"),
        (cut, "changed"),
        (Path.unlink, "missing"),
        (lambda file: (file.unlink(), file.mkdir()), "missing"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "unreadable"),
        (lambda file: os.symlink(file.rename(file.parents[1] / file.name), file), "unreadable"),
    ],
)
def test_every_difference_is_named(spoil: Callable[[Path], Any], what: str, copy: Path) -> None:
    names = ["config.json", "README.md", next(copy.glob("model-00001*")).name]
    for name in names:
        spoil(copy / name)
    assert found(copy) == dict.fromkeys(names, what)
    code, said = checked(copy)
    assert code == 1
    assert all(f"{what}: {name}" in said for name in names)


def test_what_is_new_is_named_as_well(copy: Path) -> None:
    flip_bit(copy / "config.json")
    (copy / "more").mkdir()
    (copy / "more" / "notes.txt").touch()
    assert found(copy) == {"config.json": "changed", "more/notes.txt": "extra"}
    assert "2 differences" in checked(copy)[1]


def test_a_manifest_that_was_changed_is_a_difference(copy: Path) -> None:
    manifest = json.loads((copy / "growkit.json").read_text())
    write_json(copy / "growkit.json", manifest)  # the control: the same again
    assert found(copy) == {}
    write_json(copy / "growkit.json", {**manifest, "promise": "exactly"})
    assert found(copy) == {"growkit.json": "changed"}


def test_names_that_lead_elsewhere_are_not_read(copy: Path) -> None:
    """A manifest is a stranger's word: only files that were found in the folder are opened."""
    (copy.parent / "secret").write_text("")
    manifest = json.loads((copy / "growkit.json").read_text())
    manifest["files"]["../secret"] = [0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b"]
    write_json(copy / "growkit.json", manifest)
    assert found(copy) == {"growkit.json": "changed", "../secret": "missing"}


def test_the_layout_of_the_hub_cache_is_whole(copy: Path, tmp_path: Path) -> None:
    """There every file is a link into the blobs beside the snapshots."""
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    blobs = tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(copy.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs", str(number)))
    assert found(snapshot) == {}
    flip_bit(blobs / "0")
    assert set(found(snapshot).values()) == {"changed"}
