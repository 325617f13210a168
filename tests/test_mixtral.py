"""Random Mixtral models, in both forms on disk, grown and judged by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

import growkit
from growkit.base.errors import InputError
from tests.conftest import relative_error, save_random, seeded


def save_mixtral(folder: Path, choose: Random, seed: int, *, stacked: bool) -> Path:
    """A tiny random model; its experts one by one, as transformers saves them, or stacked."""
    kv_heads, experts = choose.choice([1, 2]), choose.choice([2, 3, 4])
    config = MixtralConfig(
        vocab_size=29,
        hidden_size=choose.choice([16, 32]),  # fast products need rows of 16 bytes
        intermediate_size=choose.choice([8, 16]),
        num_hidden_layers=2,
        num_attention_heads=kv_heads * choose.choice([1, 2]),
        num_key_value_heads=kv_heads,
        head_dim=4,
        num_local_experts=experts,
        num_experts_per_tok=choose.choice([1, 2]),
        max_position_embeddings=64,
        tie_word_embeddings=choose.random() < 0.5,
    )
    dtype = choose.choice([torch.float32, torch.bfloat16])
    save_random(folder, config, seed, dtype)
    if stacked:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("seed", range(12))
def test_any_mixtral(seed: int, stacked: bool, tmp_path: Path) -> None:
    choose = seeded(seed)
    source = save_mixtral(tmp_path / "source", choose, seed, stacked=stacked)
    sizes = {"hidden": f"x{choose.choice([2, 3])}", "ffn": f"x{choose.choice([1, 2, 3])}"}
    symmetry = choose.choice(["break", "keep"])
    growkit.grow(source, tmp_path / "out", symmetry=symmetry, verify=False, **sizes)
    assert relative_error(source, tmp_path / "out") < 1e-12
    names = {True: "mlp.experts.gate_up_proj", False: "block_sparse_moe.experts.0.w1.weight"}
    assert any(name.endswith(names[stacked]) for name in load_file(source / "model.safetensors"))


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_its_proof_holds_and_misses_nothing(stacked: bool, tmp_path: Path) -> None:
    source = save_mixtral(tmp_path / "source", seeded(1), 1, stacked=stacked)
    settings = growkit.Settings(prompts=1, length=16)
    out = tmp_path / "out"
    assert growkit.grow(source, out, hidden="x2", verify=settings)["kept"]
    weights = load_file(out / "model.safetensors")
    name = next(name for name in weights if "experts" in name)
    weights[name].view(-1)[3] *= 1.5
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    found = growkit.verify(source, out, prompts=1, length=16)
    assert not found["kept"]
    assert found["first_lost_tensor"] == name


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    source = save_mixtral(tmp_path / "source", seeded(2), 2, stacked=False)
    file = source / "config.json"
    config = json.loads(file.read_text())
    config["num_local_experts"] += 1
    file.write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"tensor model\.layers\.0\.block_sparse_moe\.gate\.weight"
    ):
        growkit.inspect(source)
