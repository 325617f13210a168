"""The rules of the house: a new family or method is one new file; small things have one place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import growkit
from growkit import families, growth
from growkit.algebra.axes import Layout, Role
from growkit.families import family_of
from growkit.growth import methods
from tests.conftest import relative_error, save_model

METHOD = """
from growkit.copying import CopyMethod
from growkit.growth import SizeOption

METHOD = CopyMethod(
    name="wide-mlp",
    summary="copy the MLP",
    paper="https://example.org",
    promise="exact",
    options=(SizeOption("inner", ("ffn",), "MLP size"),),
)
"""
FAMILY = """
from dataclasses import replace
from growkit.families.llama import FAMILY as LLAMA

FAMILY = replace(LLAMA, name="Other", model_types=("other",))
"""


def test_a_method_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide_mlp_for_this_test.py").write_text(METHOD)
    monkeypatch.setattr(growth, "__path__", [*growth.__path__, str(tmp_path)])
    assert "wide-mlp" in methods()
    source = save_model(tmp_path / "source", "llama")
    growkit.grow(source, tmp_path / "out", method="wide-mlp", inner="x3", verify=None)
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_a_family_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_for_this_test.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert family_of({"model_type": "other"}, "here").name == "Other"


def test_options_of_methods_are_options_of_the_command() -> None:
    from growkit.cli import app

    shown = CliRunner().invoke(app, ["grow", "--help"], env={"COLUMNS": "200"}).stdout
    for method in methods().values():
        for option in method.options:
            assert "--" + option.name.replace("_", "-") in shown


def test_growth_and_families_are_data() -> None:
    """Reading them imports neither torch nor transformers."""
    code = (
        "import sys\n"
        "from growkit.families import families\n"
        "from growkit.growth import methods\n"
        "families(), methods()\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("notation", "shape", "written", "read"),
    [
        ("heads.dim <- hidden", (6, 5), {"heads", "dim"}, {"hidden"}),
        ("vocab -> hidden", (7, 5), {"hidden"}, {"vocab"}),
        ("hidden", (5,), {"hidden"}, set()),
        ("<- hidden", (5,), set(), {"hidden"}),
        ("heads.dim + dim <- hidden", (9, 5), {"heads", "dim"}, {"hidden"}),
    ],
)
def test_layouts(notation: str, shape: tuple[int, ...], written: set[str], read: set[str]) -> None:
    layout = Layout.parse(notation)
    assert layout.shape({"heads": 2, "dim": 3, "hidden": 5, "vocab": 7}) == shape
    assert layout.axes(Role.WRITTEN) == written
    assert layout.axes(Role.READ) == read


def test_no_family_is_named_outside_its_file() -> None:
    """There is no ``if model_type ==`` in the house."""
    package = Path(growkit.__file__).parent
    names = {kind for family in families.families().values() for kind in family.model_types}
    for file in package.rglob("*.py"):
        if file.parent.name == "families":
            continue
        text = file.read_text()
        assert not any(f'"{name}"' in text or f"'{name}'" in text for name in names), file
