"""Settings that no prompt shows, of models whose layers, experts or class are not the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

import growkit
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import oracle
from growkit.proof.config import follows
from growkit.proof.folder import compare_with_plan
from growkit.proof.modes import LONGEST
from growkit.proof.weights import origin_of
from growkit.recipe.manifest import read_record
from tests import left_out
from tests.conftest import save_random
from tests.families import MOE, SIZES
from tests.test_without_manifest import change, found

QUICK = growkit.Settings(prompts=1, length=16)
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
MODEL: dict[str, Any] = {**SIZES, **HEADS, "hidden_size": 8, "intermediate_size": 8}
GROWTHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deeper": (
        "ministral",
        {"sliding_window": 5, "eos_token_id": [2]},
        {"method": "depth", "layers": "x2"},
    ),
    "more experts": ("mixtral", {**MOE, "num_local_experts": 2}, {"method": "experts"}),
    "another class": ("qwen2", {}, {"method": "upcycle", "top_k": 2}),
    "wider": ("qwen3", {}, {"hidden": "x2"}),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    made = {}
    for name, (kind, settings, growth) in GROWTHS.items():
        folder = tmp_path_factory.mktemp("pair")
        source = save_random(folder / "source", CONFIG_MAPPING[kind](**MODEL | settings))
        experts = {} if growth.get("method") not in ("experts", "upcycle") else {"experts": "x4"}
        growkit.grow(source, folder / "target", verify=False, **growth, **experts)
        made[name] = source, folder / "target"
    return made


@pytest.mark.parametrize("name", GROWTHS)
def test_no_false_alarm(name: str, pairs: dict[str, tuple[Path, Path]]) -> None:
    assert found(*pairs[name])[0] == ()


@pytest.mark.parametrize(
    ("name", "key", "value", "changed"),
    [
        ("deeper", "eos_token_id", [2, 3], True),
        ("deeper", "sliding_window", 40, True),
        ("deeper", "layer_types", ["full_attention"] * 4, True),
        ("more experts", "num_experts_per_tok", 3, True),
        ("more experts", "sliding_window", 40, True),
        ("another class", "num_experts_per_tok", 4, False),
        ("another class", "scoring_func", "sigmoid", False),
        ("another class", "layer_types", ["sliding_attention", "full_attention"], True),
        ("another class", "max_position_embeddings", 32, True),
        ("another class", "architectures", ["EvilForCausalLM"], True),
        ("another class", "architectures", [], False),
        ("wider", "max_window_layers", 0, False),
        ("wider", "sliding_window", 40, False),
        ("wider", "torch_dtype", "float16", False),
        ("wider", "use_cache", False, False),
        ("wider", "architectures", ["Qwen2ForCausalLM"], True),
    ],
)
def test_a_setting_that_no_prompt_shows(
    name: str, key: str, value: Any, changed: bool, pairs: dict[str, tuple[Path, Path]]
) -> None:
    source, target = pairs[name]
    was = (target / "config.json").read_bytes()
    also = {"sliding_window": 40} if key == "layer_types" and changed else {}
    try:
        change(target, **{key: value}, **also)
        decides, told = found(source, target)
        checkpoints = Checkpoint(source), Checkpoint(target)
        origin = origin_of(*checkpoints, read_record(checkpoints[1]))
        by_manifest = compare_with_plan(*checkpoints, origin.lineage.plans[-1].config)
    finally:
        (target / "config.json").write_bytes(was)
    assert any(key in said for said in (decides if changed else told)), (decides, told)
    assert changed or not decides
    assert any(key in said for said in (*by_manifest.changed, *by_manifest.named))


LEFT_OUT = (*("max_position_embeddings", "rope_parameters"), *("bos_token_id", "eos_token_id"))
OTHER_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "differential": ("qwen2", "convert", {"to": "diff"}),
    "experts": ("olmo2", "grow", {"method": "upcycle", "experts": 4}),
    "layout": ("llama", "convert", {"to": "mistral"}),
}


def without_keys(folder: Path, kind: str) -> Path:
    """A folder whose config leaves out what its class and others assume otherwise."""
    source = save_random(folder / "source", CONFIG_MAPPING[kind](**MODEL | {"pad_token_id": 3}))
    file = source / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if k not in LEFT_OUT}))
    return source


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_what_a_class_assumes_goes_along(name: str, tmp_path: Path) -> None:
    kind, verb, options = OTHER_CLASSES[name]
    source = without_keys(tmp_path, kind)
    made = getattr(growkit, verb)(source, tmp_path / "out", verify=QUICK, **options)
    assert made["kept"], made["verification"]["reason"]
    was, now = (AutoConfig.from_pretrained(each).to_dict() for each in (source, tmp_path / "out"))
    assert {key: now[key] for key in LEFT_OUT} == {key: was[key] for key in LEFT_OUT}


def test_a_plan_that_changes_what_a_class_assumes_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "write_defaults_out", lambda source, planned, where: planned)
    source = without_keys(tmp_path, "qwen2")
    made = growkit.convert(source, tmp_path / "out", to="diff", verify=QUICK)
    assert not made["kept"]
    reason = made["verification"]["reason"]
    assert "is not what it is in the source" in reason, reason
    assert "max_position_embeddings in config.json" in made["verification"]["changed"]
    longest = next(m for m in made["verification"]["modes"] if m["name"] == LONGEST)
    assert "32,767" in longest["note"]  # the source's limit: the target's is lower


@pytest.mark.parametrize("kind", ["qwen3", "granite", "v2"])
def test_keys_that_are_left_out(kind: str) -> None:
    tried = list(left_out.outcomes(kind, pairs=1, singles=1))
    assert len(tried) > 20
    assert [each for each in tried if each.wrong] == []


def test_the_layers_of_a_deeper_model_keep_their_types(tmp_path: Path) -> None:
    """Right ones go without saying; wrong ones decide, whether layers are copies or not known."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    settings = {"num_hidden_layers": 3, "layer_types": types, "sliding_window": 5}
    source = save_random(tmp_path / "source", CONFIG_MAPPING["ministral"](**MODEL | settings))
    growkit.grow(source, tmp_path / "out", method="depth", layers=5, verify=False)
    planned = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert found(source, tmp_path / "out") == ((), ())
    for one, other in ((0, 4), (0, 2)):
        wrong = list(planned)
        wrong[one], wrong[other] = planned[other], planned[one]
        change(tmp_path / "out", layer_types=wrong)
        assert (
            wrong == planned or "layer_types in config.json" in found(source, tmp_path / "out")[0]
        )
    assert follows("ab", "aabb", None)
    assert not follows("ab", "bbaa", None)
    assert not follows("ab", "aabb", [frozenset({0}), frozenset({1}), frozenset(), frozenset({1})])


@pytest.mark.parametrize(("stored", "said"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_dtype_that_the_source_leaves_out(stored: str, said: str, tmp_path: Path) -> None:
    """It is loaded in that of its weights, so a narrower one rounds them."""
    dtype = getattr(torch, stored)
    for name in ("source", "out"):
        save_random(tmp_path / name, CONFIG_MAPPING["llama"](**MODEL), dtype=dtype)
    file = tmp_path / "source" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: config[key] for key in config.keys() - {"dtype"}}))
    change(tmp_path / "out", dtype=said)
    decides = found(tmp_path / "source", tmp_path / "out")[0]
    assert ("dtype in config.json" in decides) == (said == "bfloat16")
