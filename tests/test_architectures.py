"""Models of all kinds: a sound pair is preserved or refused in a sentence, a fault is caught."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import growkit
from tests import architectures, odd_pairs
from tests.architectures import TYPES, outcome, save, with_fault

KINDS = {
    "experts": "mixtral",
    "recurrent": "mamba",
    "recurrent and attention": "jamba",
    "several states": "gemma3n_text",
    "what goes along": "glm_moe_dsa",
    "infinity in the config": "bamba",
    "integers in the files": "deepseek_v4",
    "a class with a cache of its own": "minimax",
    "a context that no config names": "whisper",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sampled(5)
def test_a_copy_is_preserved_and_a_fault_is_caught(kind: str, tmp_path: Path) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    source = save(kind, tmp_path / "source")
    shutil.copytree(source, tmp_path / "copy")
    assert outcome(source, tmp_path / "copy").startswith("preserved")
    assert with_fault(source, tmp_path / "spoiled")
    assert outcome(source, tmp_path / "spoiled").startswith("not preserved")


@pytest.mark.usage
def test_experts_are_saved_and_generate(tmp_path: Path) -> None:
    source = save("mixtral", tmp_path / "source")
    modes = {mode["name"]: mode for mode in growkit.verify(source, source, prompts=2)["modes"]}
    assert modes["generate"]["kept"] is True
    assert modes["save and reload"]["kept"] is True


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", TYPES)
def test_no_kind_gives_a_false_alarm(kind: str, tmp_path: Path) -> None:
    try:
        source = save(kind, tmp_path / "source")
    except Exception as error:  # what transformers itself cannot make
        pytest.skip(f"{kind}: {error}")
    shutil.copytree(source, tmp_path / "copy")
    found = outcome(source, tmp_path / "copy")
    assert found.startswith(("preserved", "refused"))
    if found.startswith("preserved") and with_fault(source, tmp_path / "spoiled"):
        assert not outcome(source, tmp_path / "spoiled").startswith("preserved")


def test_what_text_does_not_reach_is_named(tmp_path: Path) -> None:
    if "git" not in TYPES:
        pytest.skip("transformers has no git")
    source = save("git", tmp_path / "source")
    assert "holds weights that text does not reach" in outcome(source, source)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(200))
def test_odd_but_sound_models_are_preserved(seed: int, tmp_path: Path) -> None:
    said, what = odd_pairs.outcome(seed, tmp_path)
    assert said.startswith(("preserved", "not sound", "refused: the model in")), (said, what)


def test_sizes_fit_types() -> None:
    assert set(architectures.KINDS) <= set(TYPES) | {"blt"}
