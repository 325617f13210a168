"""Settings that no prompt shows, of models whose layers, experts or class are not the source's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import growkit
from growkit.checkpoint.reading import Checkpoint
from growkit.manifest import read_record
from growkit.proof.files.folder import beside_plan
from growkit.proof.origin import origin_of
from tests.conftest import save_random
from tests.families import MOE, SIZES
from tests.test_without_manifest import change, found

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
        ("deeper", "layer_types", ["full_attention"] * 4, False),
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
        origin = origin_of(*checkpoints, read_record(checkpoints[1]).recipe)
        by_manifest = beside_plan(*checkpoints, origin.plans[-1].config)
    finally:
        (target / "config.json").write_bytes(was)
    assert any(key in said for said in (decides if changed else told)), (decides, told)
    assert changed or not decides
    assert any(key in said for said in (*by_manifest.changed, *by_manifest.named))
