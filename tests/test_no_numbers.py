"""What a source itself cannot do, or rounds, is not held against what is made of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit.engine.metrics import Distance
from growkit.results.proof import VerifyResult
from tests.conftest import edit_weights, save_random

QUICK = growkit.Settings(prompts=2, length=24)
NO_NAMES = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def saved(folder: Path, kind: str, dtype: torch.dtype, seed: int = 0, **config: object) -> Path:
    made = CONFIG_MAPPING[kind](**{"vocab_size": 29, "num_hidden_layers": 2, **NO_NAMES, **config})
    return save_random(folder, made, seed, dtype)


def verified(source: Path, out: Path) -> VerifyResult:
    return growkit.verify(source, out, settings=QUICK)


class TestPadding:
    """In float64 some classes make infinities of padding."""

    @pytest.fixture
    def bloom(self, tmp_path: Path) -> Path:
        source = saved(tmp_path / "source", "bloom", torch.float64, hidden_size=16, n_head=4)
        growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
        return tmp_path

    def test_on_the_left_is_not_held_against_the_target(self, bloom: Path) -> None:
        found = verified(bloom / "source", bloom / "out")
        assert found["kept"]
        way = next(each for each in found["modes"] if each["name"] == "left padding")
        assert way["native"] is None
        assert way["native_tolerance"] is None
        assert way["note"].endswith("in float64 the source computes NaN or infinite logits")
        others = [each for each in found["modes"] if each["name"] == "prefill"]
        assert others[0]["native_tolerance"] is not None

    def test_hides_no_fault(self, bloom: Path) -> None:
        with edit_weights(bloom / "out") as tensors:
            tensors["transformer.h.1.mlp.dense_4h_to_h.weight"][0] *= 1.5
        assert not verified(bloom / "source", bloom / "out")["kept"]

    def test_with_a_window_is_no_fault_either(self, tmp_path: Path) -> None:
        config = {
            "hidden_size": 72,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 7,
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "max_position_embeddings": 64,
        }
        source = saved(tmp_path / "source", "gemma2", torch.float64, **config)
        assert growkit.grow(source, tmp_path / "out", ffn="x2", verify=QUICK)["kept"]


def test_numbers_of_the_target_alone_are_asked_for() -> None:
    """A NaN of the target is a fault, one of the source is none."""
    for source, target, usable in [(math.nan, 1.0, False), (1.0, math.nan, True)]:
        found = Distance()
        found.add(torch.tensor([[source, 2.0]]), torch.tensor([[target, 2.0]]), torch.tensor([-1]))
        assert found.usable is usable
        assert math.isnan(found.relative)


@pytest.mark.parametrize("seed", [1, 4])
def test_float64_leaves_as_much_room_as_the_strict_comparison(tmp_path: Path, seed: int) -> None:
    """Three copies are sums of three rounded parts, of which the source has one."""
    sizes = {"hidden_size": 12, "ffn_dim": 20, "num_attention_heads": 2, "word_embed_proj_dim": 12}
    source = saved(tmp_path / "source", "opt", torch.float64, seed, **sizes)
    out = tmp_path / "out"
    growkit.grow(source, out, hidden="x3", symmetry="keep", verify=QUICK)
    found = verified(source, out)
    assert found["kept"]
    assert found["native"]["tolerance"] >= found["strict_float64"]["tolerance"]
    with edit_weights(out) as tensors:
        tensors["model.decoder.layers.1.fc2.weight"][0] *= 1.5
    assert not verified(source, out)["kept"]


@pytest.mark.usage
def test_a_class_that_cannot_run_in_float64_when_it_is_loaded_whole(tmp_path: Path) -> None:
    config = {"n_embd": 16, "n_head": 4, "n_positions": 64, "reorder_and_upcast_attn": True}
    source = saved(tmp_path / "source", "gpt2", torch.float32, **config)
    made = growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
    assert made["kept"]
    ways = {each["name"]: each for each in made["verification"]["modes"]}
    for name in ("save and reload", "generate"):
        assert ways[name]["kept"] is None
        assert ways[name]["note"].startswith("transformers cannot ")


def test_training_with_new_tokens_is_looked_at_on_the_old_ones(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    source = saved(tmp_path / "source", "llama", torch.float32, **sizes)
    settings = growkit.Settings(prompts=1, length=24, steps=2)
    made = growkit.grow(source, tmp_path / "out", vocab="x2", new_tokens="mean", verify=settings)
    assert made["kept"]
    training = made["verification"]["training"]
    assert training["kept"] is None
    assert training["why"]
    assert math.isfinite(training["relative"])
