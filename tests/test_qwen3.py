"""Random Qwen3 models, grown, and judged by transformers in strict float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

import growkit
from tests.conftest import relative_error, save_random, seeded


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(40))
def test_any_qwen3(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2, 4])
    config = Qwen3Config(
        vocab_size=29,
        hidden_size=choose.choice([12, 16, 20]),
        intermediate_size=choose.choice([7, 24]),
        num_hidden_layers=choose.choice([1, 3]),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=choose.choice([4, 6]),
        max_position_embeddings=64,
        attention_bias=choose.random() < 0.5,
        tie_word_embeddings=choose.random() < 0.5,
        use_sliding_window=choose.random() < 0.3,
        sliding_window=5,
        max_window_layers=1,
    )
    source = save_random(
        tmp_path / "source", config, seed, choose.choice([torch.float32, torch.bfloat16])
    )
    sizes = {name: f"x{choose.choice([1, 2, 3])}" for name in ("hidden", "ffn")}
    heads = choose.choice([2, 4])
    sizes |= {"heads": f"x{heads}", "kv_heads": f"x{choose.choice([1, heads])}"}
    symmetry = choose.choice(["break", "keep"])
    growkit.grow(source, tmp_path / "out", symmetry=symmetry, verify=False, **sizes)
    assert relative_error(source, tmp_path / "out") < 1e-12
    before, after = growkit.inspect(source), growkit.inspect(tmp_path / "out")
    assert after["sizes"]["heads"] == heads * before["sizes"]["heads"]


def test_its_proof_holds_and_it_becomes_differential(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
    )
    source = save_random(tmp_path / "source", config)
    settings = growkit.Settings(prompts=1, length=16)
    grown = growkit.grow(source, tmp_path / "out", hidden="x2", verify=settings)
    assert grown["kept"]
    converted = growkit.convert(source, tmp_path / "diff", to="diff-v2", verify=settings)
    assert converted["kept"]
