"""Random DiffLlamas grown 1:1, and judged by transformers in strict float64."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DiffLlamaForCausalLM

import growkit
from growkit.base.errors import InputError
from tests.conftest import relative_error, save_model, seeded


def draw(choose: Random) -> tuple[dict[str, Any], dict[str, str]]:
    """A random legal config, and random legal sizes to grow it to."""
    kv_pairs = choose.choice([1, 2, 3])
    group = choose.choice([1, 2, 4])
    config = {
        "hidden_size": choose.choice([12, 16, 20]),
        "intermediate_size": choose.choice([7, 12, 24]),
        "num_hidden_layers": choose.choice([1, 2, 3]),
        "num_attention_heads": 2 * kv_pairs * group,
        "num_key_value_heads": 2 * kv_pairs,
        "head_dim": choose.choice([4, 6]),
        "attention_bias": choose.random() < 0.5,
        "tie_word_embeddings": choose.random() < 0.5,
        "rms_norm_eps": choose.choice([1e-5, 1e-2]),
        "lambda_std_dev": 0.3,
    }
    while True:
        heads, kv_heads = choose.choice([1, 2, 3, 4]), choose.choice([1, 2, 3, 4])
        sizes = {"hidden": choose.choice([1, 2, 3, 4]), "ffn": choose.choice([1, 2, 3])}
        sizes |= {"heads": heads, "kv_heads": kv_heads}
        if heads * group % kv_heads == 0 and max(sizes.values()) > 1:
            return config, {name: f"x{factor}" for name, factor in sizes.items()}


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(120))
def test_any_diffllama(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config, sizes = draw(choose)
    dtype = choose.choice([torch.float32, torch.bfloat16, torch.float16])
    source = save_model(tmp_path / "source", "diffllama", seed, dtype, **config)
    growkit.grow(
        source,
        tmp_path / "target",
        symmetry=choose.choice(["break", "keep"]),
        seed=seed,
        verify=None,
        **sizes,
    )
    assert relative_error(source, tmp_path / "target") < 1e-12


@pytest.mark.parametrize("kv_heads", ["x1", "x2"])
def test_it_stays_diffllama(kv_heads: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama")
    growkit.grow(source, tmp_path / "target", hidden="x2", kv_heads=kv_heads, verify=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert type(model) is DiffLlamaForCausalLM
    assert model.config.num_attention_heads == 8
    assert relative_error(source, tmp_path / "target") < 1e-12


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_tiling_rows_naively_fails(projection: str, tmp_path: Path) -> None:
    """[S N S N] is what generic cloning writes; DiffLlama reads it as [S N] and [S N]."""
    source = save_model(tmp_path / "source", "diffllama", num_key_value_heads=4)
    growkit.grow(source, tmp_path / "target", hidden="x2", symmetry="keep", verify=None)
    assert relative_error(source, tmp_path / "target") < 1e-12

    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.{projection}.weight"
    original = load_file(source / "model.safetensors")[name]
    tensors[name] = (original.repeat(2, 1) / 2).repeat_interleave(2, 1).contiguous()
    save_file(tensors, file, {"format": "pt"})
    assert relative_error(source, tmp_path / "target") > 1e-3


def test_sizes_are_in_the_units_of_the_config(tmp_path: Path) -> None:
    """DiffLlama's head counts are signal and noise heads together."""
    source = save_model(tmp_path / "source", "diffllama")
    grown = growkit.grow(source, tmp_path / "target", hidden=16 * 3, heads=12, kv_heads=2)
    assert grown["copies"] == [{"hidden": 3, "ffn": 3, "signal_heads": 3, "noise_heads": 3}]
    assert growkit.inspect(tmp_path / "target")["sizes"]["kv_heads"] == 1


def test_odd_heads_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama")
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"num_attention_heads": 4', '"num_attention_heads": 3')
    )
    with pytest.raises(InputError, match=r"num_attention_heads is 3.*multiple of 2"):
        growkit.inspect(source)
