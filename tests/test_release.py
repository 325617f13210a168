"""What a release holds: all that commands read, nothing that only we need, one version."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import growkit
from growkit.recipe.recipe import shipped_recipes
from growkit.results import versions

ROOT = Path(growkit.__file__).parents[1]


def below(folder: str) -> set[str]:
    """Everything in a folder that is not made by running something."""
    files = (file for file in (ROOT / folder).rglob("*") if file.is_file())
    return {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("dist")
    for builder in (SdistBuilder, WheelBuilder):
        list(builder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    return folder


def test_a_wheel_holds_what_commands_read(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if not name.startswith(f"growkit-{growkit.__version__}.")}
    assert own == below("growkit") | {f"growkit/{name}" for name in below("recipes")}
    assert {f"growkit/recipes/{name}.yaml" for name in shipped_recipes()} <= own
    assert {
        "growkit/py.typed",
        "growkit/report/page.css",
        "growkit/cli/demo/model/config.json",
    } <= own
    assert not [name for name in names if "test" in name]


def test_an_sdist_holds_what_tests_read(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("growkit", "recipes", "tests", "docs", "benchmarks", "examples")
    assert set.union(*map(below, folders)) <= names
    assert {file.name for file in ROOT.glob("*.md")} <= names
    assert {"LICENSE", "Makefile", "PKG-INFO"} <= names


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", growkit.__version__)
    assert versions()["growkit"] == growkit.__version__
    others = [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *(ROOT / "growkit").glob("*.py")]
    assert len(others) > 3
    stands = [file.name for file in others if f'"{growkit.__version__}"' in file.read_text("utf-8")]
    assert stands == ["version.py"]


def test_it_can_be_cited() -> None:
    """What https://citation-file-format.github.io asks for; nobody is made up."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert cited["authors"] == [{"name": "growkit developers"}]
