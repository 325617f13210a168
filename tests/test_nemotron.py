"""Nemotron, judged by transformers in strict float64: tied heads read norms that add 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronConfig

import growkit
from growkit.base.errors import InputError
from tests.conftest import relative_error, save_random

GROWTHS: tuple[dict[str, str], ...] = (
    {"hidden": "x2"},
    {"hidden": "x3"},
    {"ffn": "x2"},
    {"hidden": "x2", "kv_heads": "x1"},
    {"heads": "x2", "kv_heads": "x1"},
    {"method": "depth", "layers": "x1.5"},
)


def nemotron(tied: bool = True) -> NemotronConfig:
    return NemotronConfig(
        vocab_size=29,
        hidden_size=20,
        intermediate_size=7,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "growth",
    GROWTHS,
    ids=lambda growth: "-".join(f"{name}-{size}" for name, size in growth.items()),
)
def test_every_growth_is_exact(
    growth: dict[str, str], tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    source, out = save_random(tmp_path / "source", nemotron(tied), 5, dtype), tmp_path / "out"
    assert growkit.grow(source, out, verify=False, **growth)["promise"] == "exact"
    assert relative_error(source, out) < 1e-12


def test_halves_of_a_norm_without_its_1_are_another_model(tmp_path: Path) -> None:
    """The control: w/2 twice is what a description without the 1 would write."""
    source, out = save_random(tmp_path / "source", nemotron()), tmp_path / "out"
    settings = growkit.Settings(prompts=1, length=16)
    assert growkit.grow(source, out, hidden="x2", verify=settings)["kept"]
    tensors = load_file(out / "model.safetensors")
    last = load_file(source / "model.safetensors")["model.norm.weight"] / 2
    tensors["model.norm.weight"] = torch.cat([last, last])
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert relative_error(source, out) > 1e-3
    assert not growkit.verify(source, out, prompts=1, length=16)["kept"]


def test_a_config_that_the_class_does_not_load_is_refused(tmp_path: Path) -> None:
    source, out = save_random(tmp_path / "source", nemotron()), tmp_path / "out"
    file = source / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_key_value_heads": None}))
    with pytest.raises(InputError, match="a Nemotron model needs num_key_value_heads"):
        growkit.grow(source, out, hidden="x2", verify=False)
    assert not out.exists()
