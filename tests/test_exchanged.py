"""``verify`` with its arguments exchanged says so, and claims nothing."""

from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.base.errors import InputError
from tests.conftest import cli, save_model

QUICK: dict[str, Any] = {"prompts": 1, "length": 8}
SAID = "the arguments appear to be exchanged"


def made(source: Path, target: Path, how: str) -> Path:
    if how == "convert":
        growkit.convert(source, target, "diff-v2", verify=False)
    else:
        method = "depth" if how == "layers" else "hypercloning"
        growkit.grow(source, target, method=method, verify=False, **{how: "x2"})
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("exchanged") / "source", "llama")


@pytest.mark.parametrize("how", ["hidden", "ffn", "layers", "convert"])
def test_exchanged_arguments(how: str, source: Path, tmp_path: Path) -> None:
    target = made(source, tmp_path / "target", how)
    assert growkit.verify(source, target, **QUICK)["kept"]
    with pytest.raises(InputError, match=f"^{SAID}: growkit.json in .*target records"):
        growkit.verify(target, source, **QUICK)
    done = cli("verify", target, source)
    assert done.exit_code == 2
    assert f"growkit verify {source} {target}" in " ".join(done.output.split())
    (target / "growkit.json").unlink()  # nothing says which was first
    other_way = growkit.verify(target, source, **QUICK)
    assert other_way["kept"], other_way["reason"]
    assert other_way["weights_recovered"] is None


def test_sources_that_were_made_themselves(source: Path, tmp_path: Path) -> None:
    """A source may have a manifest, whether its target has one or was saved again without."""
    first = made(source, tmp_path / "first", "hidden")
    second = made(first, tmp_path / "second", "ffn")
    assert growkit.verify(first, second, **QUICK)["kept"]
    assert growkit.verify(first, first, **QUICK)["strict_float64"]["relative"] == 0
    with pytest.raises(InputError, match=SAID):
        growkit.verify(second, first, **QUICK)
    (second / "growkit.json").unlink()
    assert growkit.verify(first, second, **QUICK)["weights_recovered"] is None
    (first / "growkit.json").write_text("{")  # it says nothing that could be read
    assert growkit.verify(first, second, **QUICK)["kept"]


def test_a_vocabulary_that_grew(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    growkit.grow(source, target, vocab="x2", verify=False)
    with pytest.raises(InputError, match="the source comes first"):
        growkit.verify(target, source, **QUICK)
