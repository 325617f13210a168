"""Config and files beside the weights: saved again they are the same, whatever else is found."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from transformers import CONFIG_MAPPING, AutoTokenizer

import growkit
from growkit.base.tensors import Config
from growkit.cli.demo import MODEL
from growkit.engine.prompts import load_tokenizer
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import write_manifest
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import family_of
from growkit.planning.plan import Lineage, Plan
from growkit.proof.files import compare_with_plan
from growkit.proof.sidecars import changed_sidecars, same_ids
from tests.files import edit_json, listed
from tests.models import Make, save_model

SETTINGS: dict[str, Any] = listed("folder", "settings")
CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizer"]


@pytest.fixture(params=CLASSES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer with everything beside it."""
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copy(MODEL / "tokenizer.json", folder)
    content = SETTINGS | {"tokenizer_class": request.param}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    tokens = {"eos_token": "b", "bos_token": "a"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text('{"eos_token_id": 98, "top_k": 50}')
    (folder / "LICENSE").write_text("free")
    return folder


def first_changed_sidecar(source: Path, target: Path) -> str | None:
    return next(iter(changed_sidecars(Folder(source), Folder(target))), None)


def test_a_tokenizer_that_was_saved_again_is_the_same(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    shutil.copy(source / "LICENSE", target)
    again = {"eos_token_id": 98, "top_k": 50, "transformers_version": "5", "_from_model_config": 1}
    (target / "generation_config.json").write_text(json.dumps(again, indent=1))
    assert (target / "tokenizer.json").read_bytes() != (source / "tokenizer.json").read_bytes()
    assert not (target / "special_tokens_map.json").exists()
    assert first_changed_sidecar(source, target) is None
    assert same_ids(Folder(source), Folder(target)) == (None, None)


CHANGES: dict[str, Any] = listed("folder", "changes")


STRUCTURED = ("response_template", "response_schema", "tools", "parser")


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_setting_is_found(key: str, source: Path, tmp_path: Path) -> None:
    for name in ("changed", "removed") if key in STRUCTURED else ("changed",):
        target = shutil.copytree(source, tmp_path / name)
        assert first_changed_sidecar(source, target) is None
        with edit_json(target / "tokenizer_config.json") as content:
            content[key] = CHANGES[key] if name == "changed" else None
        for one, other in ((source, target), (target, source)):
            assert first_changed_sidecar(one, other) == "tokenizer_config.json"
        assert same_ids(Folder(source), Folder(target))[0]


@pytest.mark.parametrize("field", ["lstrip", "rstrip", "single_word", "normalized", "special"])
def test_properties_of_added_tokens(field: str, source: Path, tmp_path: Path) -> None:
    """Properties that transformers reads are a change."""
    first, second = tmp_path / "first", tmp_path / "second"
    AutoTokenizer.from_pretrained(source).save_pretrained(first)
    shutil.copytree(first, second)
    with edit_json(second / "tokenizer.json") as tokenizer:
        (token,) = [each for each in tokenizer["added_tokens"] if each["content"] == "c"]
        token[field] = not token[field]
    one, other = (repr(load_tokenizer(each).added_tokens_decoder) for each in (first, second))
    same = one == other
    assert first_changed_sidecar(first, second) == (None if same else "tokenizer.json")
    assert same_ids(Folder(first), Folder(second))[0] == (None if same else ANY)


def test_changed_files_are_found(source: Path, tmp_path: Path) -> None:
    for name in sorted(path.name for path in source.iterdir()):
        target = shutil.copytree(source, tmp_path / name)
        (target / name).write_text('{"eos_token": "d"}')
        assert first_changed_sidecar(source, target) == name
    for name in ("LICENSE", "generation_config.json", "tokenizer.json"):
        target = shutil.copytree(source, tmp_path / f"{name} missing")
        (target / name).unlink()
        assert first_changed_sidecar(source, target) == name


def test_another_vocabulary_is_found(source: Path, tmp_path: Path) -> None:
    target = shutil.copytree(source, tmp_path / "target")
    with edit_json(target / "tokenizer.json") as tokenizer:
        tokens = tokenizer["model"]["vocab"]
        tokens["x"], tokens["y"] = tokens["y"], tokens["x"]
    both = Folder(source), Folder(target)
    words = "token 'x' is number 120 in the source and number 121 in the target"
    assert same_ids(*both) == (words, None)
    assert first_changed_sidecar(source, target) == "tokenizer.json"
    (target / "tokenizer.json").write_text("{")
    assert same_ids(*both) == ("that of the target cannot be loaded", None)
    shutil.rmtree(target)
    target.mkdir()
    assert same_ids(*both) == (None, f"the tokenizer, because {target} has none")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "key", "other"), listed("folder", "a key that is left out has its default")
)
def test_a_key_that_is_left_out_has_its_default(
    kind: str, key: str, other: Any, tmp_path: Path
) -> None:
    source = Checkpoint(save_model(tmp_path / "source", kind))
    source.config = family_of(source.config, kind).named(source.config)
    default = CONFIG_MAPPING[kind](num_attention_heads=4).to_dict()[key]
    config = source.config | {key: default}
    without = {name: value for name, value in config.items() if name != key}

    def changed(wanted: Config, found: Config) -> str | None:
        source.config = deepcopy(found)
        names = compare_with_plan(Lineage(source, [Plan(deepcopy(wanted), ())]), source).changed
        assert source.config == found
        return next(iter(names), None)

    assert changed(config, without) is None
    assert changed(without, config) is None
    assert changed(without, without | {"foo": {"a": "b"}}) == "foo in config.json"
    for wanted in (config, without):
        assert changed(wanted, without | {key: other}) == f"{key} in config.json"
        assert changed(wanted | {key: other}, without) == f"{key} in config.json"


CODE = "differential_attention.py"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        (None, True),
        (lambda folder: (folder / CODE).write_text("# changed since"), False),
        (lambda folder: (folder / CODE).unlink(), False),
        (lambda folder: (folder / "more.py").write_text("# of somebody else"), False),
        (lambda folder: (folder / "growkit.json").unlink(), False),
    ],
)
def test_code_of_an_earlier_version_is_named(
    make: Make, tmp_path: Path, spoil: Callable[[Path], Any] | None, kept: bool
) -> None:
    source, out = make("llama"), tmp_path / "out"
    growkit.convert(source, out, "diff-v2", verify=False)
    (out / "seen_tokens.py").unlink()
    (out / CODE).write_text("# of an earlier version")
    (out / "earlier.py").write_text("# with the config")
    with edit_json(out / "config.json") as config:
        del config["auto_map"]["AutoModelForTokenClassification"]
        config["auto_map"]["AutoConfig"] = "earlier.DiffTransformerConfig"
    manifest = json.loads((out / "growkit.json").read_text())
    (out / "growkit.json").unlink()
    write_manifest(out, manifest, {})
    if spoil:
        spoil(out)
    result = growkit.verify(source, out, prompts=1, length=12)
    assert result.kept == kept
    assert not kept or f"{CODE}" in result["reason"]


@pytest.mark.parametrize(
    "named", ["other.DiffTransformerForCausalLM", "modeling_diff_transformer.Model"]
)
def test_classes_of_an_earlier_version_are_in_its_code(
    make: Make, tmp_path: Path, named: str
) -> None:
    source, out = make("llama"), tmp_path / "out"
    growkit.convert(source, out, "diff-v2", verify=False)
    with edit_json(out / "config.json") as config:
        config["auto_map"]["AutoModelForCausalLM"] = named
    manifest = json.loads((out / "growkit.json").read_text())
    write_manifest(out, manifest, {})
    assert not growkit.verify(source, out, prompts=1, length=12).kept
