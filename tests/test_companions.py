"""Files beside the weights: what transformers saved again is the same, what says else is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from growkit.proof.companions import different_tokenizers, first_changed_companion
from tests.test_mutations import DEMO, opened

SETTINGS: dict[str, Any] = {
    "eos_token": "b",
    "bos_token": {
        "__type": "AddedToken",
        "content": "a",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    },
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
    "padding_side": "left",
    "chat_template": "{{ messages }}",
    "additional_special_tokens": ["c"],
}
CLASSES = ["PreTrainedTokenizerFast", "GPT2TokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast"]


@pytest.fixture(params=CLASSES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer with everything beside it."""
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copy(DEMO / "tokenizer.json", folder)
    content = SETTINGS | {"tokenizer_class": request.param}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    tokens = {"eos_token": "b", "bos_token": "a"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text('{"eos_token_id": 98, "top_k": 50}')
    (folder / "LICENSE").write_text("free")
    return folder


def test_a_tokenizer_that_was_saved_again_is_the_same(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    shutil.copy(source / "LICENSE", target)
    again = {"eos_token_id": 98, "top_k": 50, "transformers_version": "5", "_from_model_config": 1}
    (target / "generation_config.json").write_text(json.dumps(again, indent=1))
    assert (target / "tokenizer.json").read_bytes() != (source / "tokenizer.json").read_bytes()
    assert not (target / "special_tokens_map.json").exists()
    assert first_changed_companion(source, target) is None
    assert different_tokenizers(source, target) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token", "d"),
        ("bos_token", "d"),
        ("pad_token", "d"),
        ("add_bos_token", False),
        ("add_eos_token", True),
        ("clean_up_tokenization_spaces", True),
        ("model_max_length", 9),
        ("padding_side", "right"),
        ("chat_template", "{{ tools }}"),
        ("additional_special_tokens", ["d"]),
    ],
)
def test_a_changed_setting_is_found(key: str, value: Any, source: Path, tmp_path: Path) -> None:
    target = shutil.copytree(source, tmp_path / "target")
    assert first_changed_companion(source, target) is None
    with opened(target / "tokenizer_config.json") as content:
        content[key] = value
    assert first_changed_companion(source, target) == "tokenizer_config.json"
    assert different_tokenizers(source, target) is None


def test_changed_files_are_found(source: Path, tmp_path: Path) -> None:
    for name in sorted(path.name for path in source.iterdir()):
        target = shutil.copytree(source, tmp_path / name)
        (target / name).write_text('{"eos_token": "d"}')
        assert first_changed_companion(source, target) == name
    for name in ("LICENSE", "generation_config.json", "tokenizer.json"):
        target = shutil.copytree(source, tmp_path / f"{name} missing")
        (target / name).unlink()
        assert first_changed_companion(source, target) == name


def test_another_vocabulary_is_found(source: Path, tmp_path: Path) -> None:
    target = shutil.copytree(source, tmp_path / "target")
    with opened(target / "tokenizer.json") as tokenizer:
        tokens = tokenizer["model"]["vocab"]
        tokens["x"], tokens["y"] = tokens["y"], tokens["x"]
    found = different_tokenizers(source, target)
    assert found is not None
    assert f"token 'x' is number 120 in {source} and number 121 in {target}" in found
    assert first_changed_companion(source, target) == "tokenizer.json"
    (target / "tokenizer.json").write_text("{")
    assert f"the tokenizer of {target} cannot be loaded" == different_tokenizers(source, target)
    shutil.rmtree(target)
    target.mkdir()
    assert different_tokenizers(source, target) is None
