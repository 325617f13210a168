"""Group-differentiated growth, judged by the real classes in strict float64."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.base.tensors import total_parameters
from growkit.engine.recipe_planning import plan_recipe
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import family_of
from growkit.model.model import Headers
from tests.files import edit_config
from tests.models import relative_error, save_model, seeded


def draw_source(choose: Random) -> tuple[str, dict[str, Any], dict[str, int]]:
    """A random model of the family: DIFF to DINT, 1:1 to 5:1, and its head counts."""
    kv = choose.choice([1, 2])
    noise = kv * choose.choice([1, 2])
    common = {
        "hidden_size": choose.choice([12, 16, 20]),
        "intermediate_size": choose.choice([7, 12, 24]),
        "num_hidden_layers": choose.choice([1, 2]),
        "head_dim": choose.choice([4, 6]),
        "attention_bias": choose.random() < 0.5,
        "tie_word_embeddings": choose.random() < 0.5,
        "lambda_std_dev": 0.3,
    }
    if choose.random() < 0.25:
        common |= {"num_attention_heads": 2 * noise, "num_key_value_heads": 2 * kv}
        return "diffllama", common, {"signal": noise, "noise": noise, "kv": kv}
    signal = noise * choose.choice([1, 2, 3, 4, 5])
    keys = choose.choice(["own", "shared"])
    common |= {
        "num_attention_heads": signal + noise,
        "num_noise_heads": noise,
        "num_key_value_heads": kv * (2 if keys == "own" else 1),
        "noise_keys": keys,
        "value_head_dim": choose.choice([4, 8, 10]),
        "lambda_type": choose.choice(["vectors", "projected"]),
        "lambda_init": [choose.uniform(0.1, 0.9) for _ in range(common["num_hidden_layers"])],
        "head_norm": choose.choice(["affine", "plain", "none"]),
        "head_output_scale": choose.choice(["one_minus_lambda_init", "none"]),
        "integral": choose.choice(["none", "causal", "column_mean"]),
        "gamma": choose.choice(["unified", "gated"]),
        "qk_projection": choose.choice(["full", "shared"]),
        "shared_scope": choose.choice(["head", "layer", "all_heads"]),
        "shared_rank": choose.choice([1, 2, 3]),
        "hidden_act": choose.choice(["silu", "poly_norm"]),
        "mlp_bias": choose.random() < 0.5,
    }
    return "diff_transformer", common, {"signal": signal, "noise": noise, "kv": kv}


def draw_factors(choose: Random) -> dict[str, int]:
    names = ("hidden", "ffn", "signal_heads", "noise_heads", "kv_heads")
    while True:
        factors = {name: choose.choice([1, 2, 3, 4]) for name in names}
        if max(factors.values()) > 1:
            return factors


def legal(heads: dict[str, int], factors: dict[str, int]) -> bool:
    signal = heads["signal"] * factors["signal_heads"]
    noise = heads["noise"] * factors["noise_heads"]
    kv = heads["kv"] * factors["kv_heads"]
    return signal % noise == 0 and signal % kv == 0 and noise % kv == 0


LEGAL, ILLEGAL = [], []
for _seed in range(700):
    _choose = seeded(_seed)
    _source = draw_source(_choose)
    (LEGAL if legal(_source[2], draw_factors(_choose)) else ILLEGAL).append(_seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", LEGAL)
def test_any_model_by_any_legal_factors(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    kind, config, heads = draw_source(choose)
    factors = draw_factors(choose)
    dtype = choose.choice([torch.float32, torch.bfloat16, torch.float16])
    source = save_model(tmp_path / "source", kind, seed, dtype, **config)
    options: dict[str, Any] = {name: f"x{factor}" for name, factor in factors.items()}
    options |= {"symmetry": choose.choice(["break", "keep"]), "seed": seed}
    growkit.grow(source, tmp_path / "target", method="group-diff", verify=None, **options)
    assert relative_error(source, tmp_path / "target") < 1e-12
    growkit.grow(source, tmp_path / "wider", hidden=f"x{2 + seed % 2}", verify=None)
    assert relative_error(source, tmp_path / "wider") < 1e-12
    target = Checkpoint(tmp_path / "target")
    sizes = target.family.sizes(target.config)
    for name, count in heads.items():
        assert sizes[f"{name}_heads"] == count * factors[f"{name}_heads"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", ILLEGAL[:60])
def test_illegal_factors_are_refused_with_the_reason(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    kind, config, _ = draw_source(choose)
    sizes = {name: f"x{factor}" for name, factor in draw_factors(choose).items()}
    source = save_model(tmp_path / "source", kind, seed, **config)
    with pytest.raises(InputError, match=r"is no multiple of .* because each"):
        growkit.grow(source, tmp_path / "target", method="group-diff", verify=None, **sizes)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("recipe", "heads", "noise"),
    [("diff-hypercloning-1-1", 32, 16), ("group-diff-3-1", 32, 8), ("group-diff-4-1", 40, 8)],
)
def test_recipes_make_the_models_of_table_3(recipe: str, heads: int, noise: int) -> None:
    """KV heads are those of signal and noise; embeddings are not counted."""
    config = {"model_type": "diffllama", "vocab_size": 128, "num_hidden_layers": 24}
    config |= {"hidden_size": 1024, "intermediate_size": 2816, "rms_norm_eps": 1e-5}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    source = Headers(family_of(config, "table 3"), config, "an example")
    file = Path(growkit.__file__).parents[1] / "recipes" / f"{recipe}.yaml"
    plan = plan_recipe(growkit.load_recipe(file, "source", "target"), source)
    target, last = plan.lineage.target.tensors, "model.layers.23.self_attn"
    assert target[f"{last}.q_proj.weight"].shape == (heads * 64, 2048)
    assert target[f"{last}.k_proj.weight"].shape == (16 * 64, 2048)
    assert target[f"{last}.o_proj.weight"].shape == (2048, (heads - noise) * 128)
    assert 1.1e9 < total_parameters(target) - 2 * 128 * 2048 < 1.8e9


def test_it_stays_diffllama_where_that_can_be(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama")
    sizes = {"hidden": "x2", "signal_heads": "x2", "noise_heads": "x2"}
    growkit.grow(source, tmp_path / "same", method="group-diff", verify=None, **sizes)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "same")) is DiffLlamaForCausalLM
    growkit.grow(source, tmp_path / "other", method="group-diff", signal_heads="x2", verify=None)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["architectures"] == ["DiffTransformerForCausalLM"]


LOADS_ALONE = """
import sys
sys.modules["growkit"] = None  # any import of it fails
import torch
from transformers import AutoModelForCausalLM
folder = "größer 2"  # any name
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
ids = torch.tensor([[1, 2, 3, 4, 5]])
out = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
print(type(model).__module__, out[0].tolist(), sep="|")
model.save_pretrained("again")
"""


@pytest.mark.sampled(0)
def test_folders_load_in_a_python_without_growkit(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, "diff_transformer", integral="causal", lambda_std_dev=0.3)
    sizes = {"hidden": "x2", "signal_heads": "x3"}
    growkit.grow(source, tmp_path / "größer 2", method="group-diff", verify=None, **sizes)
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    run: dict[str, Any] = {"env": os.environ | modules, "cwd": tmp_path, "check": True}
    ran = subprocess.run([sys.executable, "-c", LOADS_ALONE], stdout=subprocess.PIPE, **run)
    module, tokens = ran.stdout.decode().split("|")
    assert module.startswith("transformers_modules.")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=20, **options)
    assert json.loads(tokens) == expected[0].tolist()
    assert (tmp_path / "again" / "modeling_diff_transformer.py").exists()


def test_windows_of_other_classes_are_left_behind(tmp_path: Path) -> None:
    """A cache that takes such a key for its own would forget tokens."""
    source = save_model(tmp_path / "source", "diffllama")
    edit_config(source, sliding_window=4)
    growkit.grow(source, tmp_path / "out", method="group-diff", signal_heads="x2", verify=None)
    assert "sliding_window" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"sliding_window is 4.* has no windows"):
        DiffTransformerConfig(sliding_window=4)
