"""Workflows run what exists, use pinned actions, and may only read, except to publish."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
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
        text.replace("make ", "make no-"),
        text.replace("@", "@v6 # "),
        text.replace("contents: read", "contents: write"),
        text.replace("timeout-minutes", "minutes"),
    ):
        assert [*faults(file.name, broken)]


def test_every_python_that_is_supported_is_tested() -> None:
    matrix = workflow("ci")["jobs"]["test"]["strategy"]["matrix"]["python"]
    least = re.findall(r'requires-python = ">=(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert least == matrix[:1] == ["3.10"]
    assert [f"3.{minor}" for minor in range(10, 10 + len(matrix))] == matrix


def test_only_publishing_gets_a_token_and_only_after_the_tests() -> None:
    jobs = workflow("release")["jobs"]
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert {*publish["needs"]} == {"ci", "build"}
    assert "password" not in str(publish)


def workflow(name: str) -> dict[str, Any]:
    read = yaml.safe_load((FOLDER / f"{name}.yml").read_text("utf-8"))
    assert isinstance(read, dict)
    return read
