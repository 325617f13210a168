"""Config and files beside the weights: saved again they are the same, whatever else is found."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Config
from growkit.families.family import family_of
from growkit.proof.files.companions import different_tokenizers, first_changed_companion
from growkit.proof.files.folder import first_changed_file
from tests.conftest import CONFIGS, save_model
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


@pytest.mark.parametrize(
    ("kind", "key", "other"),
    [
        *[(kind, "initializer_range", 0.5) for kind in CONFIGS],
        *[(kind, "tie_word_embeddings", True) for kind in CONFIGS],
        *[(kind, "rms_norm_eps", 0.5) for kind in CONFIGS],
        ("llama", "attention_bias", True),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("mistral", "sliding_window", None),
        ("diff_transformer", "shared_rank", 3),
        ("diff_transformer", "num_noise_heads", 1),
    ],
)
def test_a_key_that_is_left_out_has_its_default(
    kind: str, key: str, other: Any, tmp_path: Path
) -> None:
    source = Checkpoint(save_model(tmp_path / "source", kind))
    source.config = family_of(source.config, kind).named(source.config)
    default = CONFIGS[kind](num_attention_heads=4).to_dict()[key]
    config = source.config | {key: default}
    without = {name: value for name, value in config.items() if name != key}

    def changed(wanted: Config, found: Config) -> str | None:
        source.config = deepcopy(found)
        name = first_changed_file(source, deepcopy(wanted), source)
        assert source.config == found
        return name

    assert changed(config, without) is None
    assert changed(without, config) is None
    for wanted in (config, without):
        assert changed(wanted, without | {key: other}) == f"{key} in config.json"
        assert changed(wanted | {key: other}, without) == f"{key} in config.json"


@pytest.mark.parametrize("key", ["foo", "rope_theta", "temperature", "auto_map", "layer_types"])
def test_a_key_that_was_added_is_found(key: str, tmp_path: Path) -> None:
    source = Checkpoint(save_model(tmp_path / "source", "llama"))
    planned = deepcopy(source.config)
    source.config = source.config | {key: {"a": "b"}}
    assert first_changed_file(source, planned, source) == f"{key} in config.json"
