"""Without a manifest the verdict says what it rests on, and no setting differs unnoticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import growkit
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.prompts import load_tokenizer
from growkit.proof import sidecars
from growkit.proof.folder import compare_with_source
from tests.conftest import edit_json, save_model
from tests.test_calibration import with_tokenizer

QUICK: dict[str, Any] = {"prompts": 1, "length": 10}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "llama", vocab_size=256, eos_token_id=2)
    with_tokenizer(source)
    growkit.grow(source, folder / "target", hidden="x2", verify=False)
    (folder / "target" / "growkit.json").unlink()
    return source


@pytest.fixture
def target(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source.with_name("target"), tmp_path / "target")


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    with edit_json(folder / name) as content:
        content.update(values)


def found(source: Path, target: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    checkpoints = Checkpoint(source), Checkpoint(target)
    beside = compare_with_source(*checkpoints)
    return tuple(beside.changed), tuple(beside.named)


def test_the_verdict_says_what_it_uncovered_notes(source: Path, target: Path) -> None:
    result = growkit.verify(source, target, **QUICK)
    assert result["kept"]
    assert result["weights_recovered"] is None
    told = "weights were not compared, because no manifest records how the target was made"
    assert told in result["reason"].split(". ")[0]
    assert (result["changed"], result["notes"], result["unknown_files"]) == ([], [], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", 32),
        ("max_position_embeddings", 128),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
        ("eos_token_id", [2, 3]),
        ("bos_token_id", 4),
        ("pad_token_id", 4),
        ("dtype", "bfloat16"),
        ("hidden_act", "gelu"),
        ("attention_window", 5),
        ("architectures", ["EvilForCausalLM"]),
    ],
)
def test_a_setting_that_no_prompt_shows(key: str, value: Any, source: Path, target: Path) -> None:
    assert found(source, target) == ((), ())
    change(target, **{key: value})
    changed, _ = found(source, target)
    assert f"{key} in config.json" in changed
    if key == "max_position_embeddings":
        result = growkit.verify(source, target, **QUICK)
        assert not result["kept"]
        assert f"{key} in config.json is not what it is in the source" in result["reason"]
        assert (
            f"({value} in place of {result['changed_values'][0]['expected']})" in result["reason"]
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("initializer_range", 0.5),
        ("attention_dropout", 0.1),
        ("dtype", "float64"),
        ("use_cache", False),  # as Trainer leaves it
    ],
)
def test_a_setting_without_effect_is_only_named(
    key: str, value: Any, source: Path, target: Path
) -> None:
    change(target, **{key: value})
    assert found(source, target) == ((), (f"{key} in config.json differs",))
    if key == "dtype":
        result = growkit.verify(source, target, **QUICK)
        assert result["kept"], result["reason"]
        assert key in result["reason"]


def test_a_window_of_attention(make: Make, tmp_path: Path) -> None:
    source = make("mistral", sliding_window=None)
    target = shutil.copytree(source, tmp_path / "target")
    change(target, sliding_window=40)  # longer than any prompt here
    result = growkit.verify(source, target, **QUICK)
    assert not result["kept"]
    assert "sliding_window in config.json is not what it is in the source" in result["reason"]


@pytest.mark.parametrize("to", ["diff-v2", "llama"])
def test_conversions_are_no_false_alarms(to: str, make: Make, tmp_path: Path) -> None:
    source = make("mistral" if to == "llama" else "llama", vocab_size=256)
    if to == "llama":
        change(source, sliding_window=None)
    growkit.convert(with_tokenizer(source), tmp_path / "target", to=to, verify=False)
    (tmp_path / "target" / "growkit.json").unlink()
    result = growkit.verify(source, tmp_path / "target", **QUICK)
    assert result["kept"], result["reason"]
    assert "only what means the same in both classes" in result["reason"]


def test_a_differential_model_of_another_layout(make: Make, tmp_path: Path) -> None:
    for to in ("motif", "diff-transformer"):
        growkit.convert(make("diffllama"), tmp_path / to, to=to, verify=False)
        (tmp_path / to / "growkit.json").unlink()
    result = growkit.verify(tmp_path / "motif", tmp_path / "diff-transformer", **QUICK)
    assert result["kept"], result["reason"]


def test_what_only_others_do_with_a_tokenizer_is_named(source: Path, target: Path) -> None:
    """transformers cuts nothing unless it is told to; who reads the file by itself does."""
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    change(target, "tokenizer.json", truncation=cut)
    (target / "tekken.json").write_text("{}")
    result = growkit.verify(source, target, **QUICK)
    assert result["kept"]
    assert "tokenizer.json was compared, not every byte" in result["reason"]
    assert result["unknown_files"] == ["tekken.json"]


def test_a_key_that_the_class_passes_over_is_named(source: Path, target: Path) -> None:
    change(target, rope_theta=5.0)
    changed, named = found(source, target)
    assert changed == ()
    assert named == ("rope_theta in config.json differs, without effect in LlamaForCausalLM",)


@pytest.mark.parametrize("key", ["transformers_version", "model_type"])
def test_a_tokenizer_depends_on_the_config(
    key: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers mends a pattern of Mistral's tokenizers, unless a version has done so."""
    first = Folder(shutil.copytree(source, tmp_path / "first"))
    second = Folder(shutil.copytree(source, tmp_path / "second"))
    loaded: list[Folder] = []

    def load(folder: Folder) -> Any:
        loaded.append(folder)
        return load_tokenizer(folder)

    monkeypatch.setattr(sidecars, "load_tokenizer", load)
    assert sidecars.changed_sidecars(first, second) == []
    assert not loaded  # nothing differs that could make another tokenizer
    change(second.path, **{key: "other"})
    assert sidecars.changed_sidecars(first, second) == []
    assert loaded == [first, second]
    monkeypatch.setattr(sidecars, "first_difference", lambda *tokenizers: "the ids")
    (said,) = sidecars.changed_sidecars(first, second)
    assert "depends on config.json" in said


def test_a_setting_that_saving_drops_is_no_contradiction(source: Path, tmp_path: Path) -> None:
    """The source's tokenizer, saved again after growth, says less and does the same."""
    again = shutil.copytree(source, tmp_path / "again")
    change(again, "tokenizer_config.json", add_bos_token=True)
    grown = tmp_path / "grown"
    growkit.grow(again, grown, ffn="x2", verify=False)
    AutoTokenizer.from_pretrained(again).save_pretrained(again)
    assert "add_bos_token" not in (again / "tokenizer_config.json").read_text()
    assert growkit.verify(again, grown, **QUICK)["kept"]
    change(grown, "tokenizer_config.json", eos_token="e")
    assert not growkit.verify(again, grown, **QUICK)["kept"]
