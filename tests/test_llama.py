"""Random Llamas, Mistrals and DiffLlamas grown, and judged by transformers in strict float64."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import growkit
from tests.conftest import relative_error, save_model, seeded
from tests.families import softmax

STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED},
    {"rope_type": "yarn", **STRETCHED},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def draw(choose: Random) -> tuple[dict[str, Any], dict[str, str]]:
    """A random legal config, and random legal sizes to grow it to."""
    config = softmax(
        choose,
        *("attention_bias", "mlp_bias"),
        head_dim=False,
        num_hidden_layers=choose.choice([1, 2, 3]),
        rms_norm_eps=choose.choice([1e-6, 1e-5, 1e-2]),
        hidden_act=choose.choice(["silu", "gelu", "relu"]),
        rope_parameters=choose.choice(ROPES),
    )
    config["head_dim"] = choose.choice([4, 6, 8])
    return config, legal_sizes(choose, config)


def draw_diffllama(choose: Random) -> tuple[dict[str, Any], dict[str, str]]:
    """A random legal config, and random legal sizes to grow it to."""
    kv_pairs = choose.choice([1, 2, 3])
    config = softmax(
        choose,
        "attention_bias",
        hidden_size=choose.choice([12, 16, 20]),
        num_hidden_layers=choose.choice([1, 2, 3]),
        num_attention_heads=2 * kv_pairs * choose.choice([1, 2, 4]),
        num_key_value_heads=2 * kv_pairs,
        head_dim=choose.choice([4, 6]),
        rms_norm_eps=choose.choice([1e-5, 1e-2]),
        lambda_std_dev=0.3,
    )
    return config, legal_sizes(choose, config, in_hidden=False)


def legal_sizes(choose: Random, config: dict[str, Any], in_hidden: bool = True) -> dict[str, str]:
    """Sizes by which a model of a config can grow; heads divide hidden in some classes."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    while True:
        hidden_x, heads_x, kv_x = (choose.choice([1, 2, 3, 4]) for _ in range(3))
        sizes = {"hidden": hidden_x, "ffn": choose.choice([1, 2, 3]), "heads": heads_x}
        sizes["kv_heads"] = kv_x
        legal = not in_hidden or config["hidden_size"] * hidden_x % (heads * heads_x) == 0
        if legal and heads // kv_heads * heads_x % kv_x == 0 and max(sizes.values()) > 1:
            return {name: f"x{factor}" for name, factor in sizes.items()}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(210))
def test_any_llama(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config, sizes = draw(choose)
    dtype = choose.choice(DTYPES)
    shard_size = choose.choice(["5GB", "6KB"])
    source = save_model(tmp_path / "source", "llama", seed, dtype, shard_size=shard_size, **config)
    options: dict[str, Any] = {"symmetry": choose.choice(["break", "keep"]), "seed": seed, **sizes}
    options |= {"snr_db": choose.choice([5.0, 10.0]), "shard_size": choose.choice(["5GB", "9KB"])}
    growkit.grow(source, tmp_path / "target", verify=None, **options)
    assert relative_error(source, tmp_path / "target") < 1e-12


def test_steps_of_a_recipe_are_one_pass(tmp_path: Path) -> None:
    """Growing twice in one recipe writes the very files that two growths write."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    growkit.grow(source, tmp_path / "one", hidden="x2", verify=None)
    growkit.grow(tmp_path / "one", tmp_path / "two", ffn="x3", symmetry="keep", verify=None)
    wide = growkit.GrowStep("hypercloning", {"hidden": "x2"})
    steps = (wide, growkit.GrowStep("hypercloning", ffn="x3", symmetry="keep"))
    growkit.run(growkit.Recipe(str(source), steps, str(tmp_path / "both"), verify=None))
    apart = load_file(tmp_path / "two" / "model.safetensors")
    together = load_file(tmp_path / "both" / "model.safetensors")
    assert apart.keys() == together.keys()
    assert all(apart[name].equal(together[name]) for name in apart)
    assert relative_error(source, tmp_path / "both") < 1e-12
