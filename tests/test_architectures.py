"""Models of all kinds: a sound pair is preserved or refused in a sentence, a fault is caught."""

import shutil
from pathlib import Path

import pytest

from tests import architectures
from tests.architectures import TYPES, outcome, save, with_fault
from tests.files import listed

KINDS = listed("architectures", "kinds")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TYPES)
def test_a_copy_is_preserved_and_a_fault_is_caught(kind: str, tmp_path: Path) -> None:
    try:
        source = save(kind, tmp_path / "source")
    except Exception as error:  # what transformers itself cannot make
        pytest.skip(f"{kind}: {error}")
    shutil.copytree(source, tmp_path / "copy")
    found = outcome(source, tmp_path / "copy")
    assert found.startswith("preserved" if kind in KINDS.values() else ("preserved", "refused"))
    spoiled = with_fault(source, tmp_path / "spoiled")
    assert spoiled or kind not in KINDS.values()
    if found.startswith("preserved") and spoiled:
        assert not outcome(source, tmp_path / "spoiled").startswith("preserved")


def test_what_text_does_not_reach_is_named(tmp_path: Path) -> None:
    if "git" not in TYPES:
        pytest.skip("transformers has no git")
    source = save("git", tmp_path / "source")
    assert "holds weights that text does not reach" in outcome(source, source)


def test_sizes_fit_types() -> None:
    assert set(architectures.KINDS) <= set(TYPES) | {"blt"}
