"""What a release holds, and what its workflows may do."""

import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import growkit
from growkit.planning.recipe import shipped_recipes
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


def test_the_site_lists_every_page() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")
    pages = [str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")]
    assert sorted(re.findall(r"\S+\.md$", nav, re.MULTILINE)) == sorted(pages)


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", growkit.__version__)
    assert versions()["growkit"] == growkit.__version__
    others = [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *(ROOT / "growkit").rglob("*.py")]
    assert len(others) > 100
    stands = [file for file in others if f'"{growkit.__version__}"' in file.read_text("utf-8")]
    assert stands == [ROOT / "growkit" / "base" / "__init__.py"]


FOLDER = ROOT / ".github" / "workflows"
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
MAKE = re.compile(r"^\s*make (\S+)", re.MULTILINE)


def faults(workflow: str, text: str) -> Iterator[str]:
    """Of one file, in words."""
    read = yaml.safe_load(text)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    if read["permissions"] != {"contents": "read"}:
        yield f"{workflow} may do more than read"
    for name, job in read["jobs"].items():
        if not limited(job):
            yield f"{name} has no limit of time"
        run = "\n".join(step.get("run", "") for step in job.get("steps", []))
        yield from (f"there is no target {name}" for name in {*MAKE.findall(run)} - targets)
    for used in re.findall(r"uses: (.+)", text):
        own = used.startswith("./") and (ROOT / used).is_file()
        if not own and not PINNED.fullmatch(used):
            yield f"{used} is not pinned"


def limited(job: dict[str, Any]) -> bool:
    return "timeout-minutes" in job or "uses" in job


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yml")), ids=lambda file: file.name)
def test_workflows_are_sound(file: Path) -> None:
    text = file.read_text("utf-8")
    assert not [*faults(file.name, text)]
    for broken in (
        re.sub(r"^(\s*(?:- run: )?)make ", r"\1make no-", text, flags=re.MULTILINE),
        text.replace("@", "@v6 # "),
        text.replace("contents: read", "contents: write"),
        text.replace("timeout-minutes", "minutes"),
    ):
        assert broken == text or [*faults(file.name, broken)]


def test_only_publishing_gets_a_token_and_only_after_the_tests() -> None:
    jobs = workflow("release")["jobs"]
    publishing = {name: job for name, job in jobs.items() if "permissions" in job}
    assert {name: job["permissions"] for name, job in publishing.items()} == {
        "publish": {"id-token": "write"},
        "pages": {"id-token": "write", "pages": "write"},
    }
    assert [job["environment"]["name"] for job in publishing.values()] == ["pypi", "github-pages"]
    assert all({*job["needs"]} == {"ci", "build"} for job in publishing.values())
    assert "password" not in str(publishing)


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text("utf-8"))
