"""Random Gemma models, grown, and judged by transformers in strict float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig

import growkit
from growkit.base.errors import InputError
from tests.conftest import relative_error, save_random, seeded


def gemma(**changes: object) -> GemmaConfig:
    sizes = {
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
    }
    return GemmaConfig(**{**sizes, "bos_token_id": None, "eos_token_id": None, **changes})


@pytest.mark.parametrize("seed", range(20))
def test_any_gemma(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config = gemma(
        hidden_size=choose.choice([12, 16, 20]),
        intermediate_size=choose.choice([7, 24]),
        attention_bias=choose.random() < 0.5,
        tie_word_embeddings=choose.random() < 0.5,
    )
    dtype = choose.choice([torch.float32, torch.bfloat16])
    source = save_random(tmp_path / "source", config, seed, dtype)
    sizes = {"hidden": choose.choice(["x1", "x4", "x16"]), "ffn": choose.choice(["x2", "x3"])}
    heads = choose.choice([2, 4])
    sizes |= {"heads": f"x{heads}", "kv_heads": f"x{choose.choice([1, heads])}"}
    growkit.grow(source, tmp_path / "out", verify=False, **sizes)
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_its_proof_holds_and_sees_a_norm_that_is_changed(tmp_path: Path) -> None:
    source, out = save_random(tmp_path / "source", gemma()), tmp_path / "out"
    settings = growkit.Settings(prompts=1, length=16)
    grown = growkit.grow(source, out, hidden="x4", verify=settings)
    assert grown["kept"]
    assert grown["verification"] is not None
    assert grown["verification"]["weights_recovered"] is True
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][-1] += 0.25  # a copy that is not read
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert not growkit.verify(source, out, prompts=1, length=16)["kept"]


@pytest.mark.parametrize("factor", ["x2", "x3", "x8", "x9"])
def test_what_the_root_of_hidden_would_round_is_refused(factor: str, tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", gemma())
    with pytest.raises(InputError, match=r"embed_tokens.* which rounds; hidden can grow by powers"):
        growkit.grow(source, tmp_path / "out", hidden=factor, verify=False)
    assert not (tmp_path / "out").exists()
