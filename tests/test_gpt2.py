"""Random GPT-2 models, grown, and judged by transformers in strict float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

import growkit
from growkit.base.errors import InputError
from tests.conftest import relative_error, save_random, seeded

SMALL = GPT2Config(
    vocab_size=29,
    n_embd=16,
    n_layer=2,
    n_head=4,
    n_positions=64,
    bos_token_id=None,
    eos_token_id=None,
)


@pytest.mark.parametrize("seed", range(30))
def test_any_gpt2(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    heads = choose.choice([1, 2, 3])
    config = GPT2Config(
        vocab_size=29,
        n_embd=heads * choose.choice([4, 6]),
        n_inner=choose.choice([None, 7, 24]),
        n_layer=choose.choice([1, 3]),
        n_head=heads,
        n_positions=64,
        tie_word_embeddings=choose.random() < 0.5,
        scale_attn_by_inverse_layer_idx=choose.random() < 0.5,
        activation_function=choose.choice(["gelu_new", "relu"]),
        bos_token_id=None,
        eos_token_id=None,
    )
    source = save_random(
        tmp_path / "source", config, seed, choose.choice([torch.float32, torch.bfloat16])
    )
    sizes = {"hidden": f"x{choose.choice([2, 3, 4])}", "ffn": f"x{choose.choice([1, 2, 3])}"}
    symmetry = choose.choice(["break", "keep"])
    growkit.grow(source, tmp_path / "out", symmetry=symmetry, verify=False, **sizes)
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_its_proof_holds(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", SMALL)
    settings = growkit.Settings(prompts=1, length=16)
    assert growkit.grow(source, tmp_path / "out", hidden="x2", verify=settings)["kept"]


def test_what_the_class_derives_is_not_written(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", SMALL)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert "head_dim" not in (tmp_path / "out" / "config.json").read_text()
    with pytest.raises(InputError, match="cannot have head_dim 4"):
        growkit.grow(source, tmp_path / "other", hidden="x2", heads="x1")
