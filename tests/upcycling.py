"""Random dense models that become models with experts, and random models with more experts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import CONFIG_MAPPING

import growkit
from tests.conftest import relative_error, save_random, seeded
from tests.families import FAMILIES, MOE, Config, coin, latent, softmax, with_class_names

DENSE = {
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "olmo2": "flex_olmo",
    "granite": "granitemoe",
    "deepseek_v3": "deepseek_v3",
}
"""By the ``model_type`` of a dense model, that of the one with experts."""

SPARSE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
)
"""Types with experts."""


def dense_config(kind: str, choose: Random) -> Config:
    """A random config of a dense model, whose MLP can be cut into four."""
    width = choose.choice([8, 12, 24])
    if kind == "deepseek_v3":
        return {**latent(choose, first_k_dense_replace=2), "intermediate_size": width}
    switches = ("attention_bias",) if kind in ("qwen3", "olmo2", "granite") else ()
    apart = kind != "llama" and coin(choose)
    sizes = softmax(choose, *switches, head_dim=kind == "qwen3" or apart)
    if kind == "mistral":
        sizes["sliding_window"] = choose.choice([None, 5])
    return {**sizes, "intermediate_size": width}


def arrangement(choose: Random) -> dict[str, int]:
    """Experts, how many are chosen, and into how many the MLP is cut."""
    pieces = choose.choice([1, 2, 4])
    chosen = choose.choice([1, 2, 3] if pieces > 1 else [2, 3])
    groups = chosen + choose.choice([0, 1, 3])
    return {"experts": groups * pieces, "top_k": chosen * pieces, "granularity": pieces}


def save_dense(kind: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A lively random dense model."""
    return save_random(
        folder, CONFIG_MAPPING[kind](**dense_config(kind, seeded(seed))), seed, dtype
    )


def upcycle_any(kind: str, seed: int, folder: Path) -> float:
    """Upcycle a random model; the relative error of its logits in strict float64."""
    choose = seeded(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    source, out = save_dense(kind, seed, folder / "source", dtype), folder / "out"
    growkit.grow(source, out, method="upcycle", seed=seed, verify=False, **arrangement(choose))
    assert json.loads((out / "config.json").read_text())["model_type"] == DENSE[kind]
    return relative_error(source, out)


def save_sparse(kind: str, seed: int, folder: Path) -> Path:
    """A lively random model with experts, one by one on disk or as its class has them."""
    choose = seeded(seed)
    config: dict[str, Any] = (
        FAMILIES[kind].any(choose)
        if kind in FAMILIES
        else softmax(choose, **MOE, num_local_experts=4, hidden_size=16)
    )
    if kind == "deepseek_v3":
        config["norm_topk_prob"] = coin(choose)
    if kind == "deepseek_v2" and coin(choose):
        config |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    dtype = choose.choice([torch.float32, torch.bfloat16])
    save_random(folder, CONFIG_MAPPING[kind](**config), seed, dtype)
    if coin(choose):
        with_class_names(folder, dtype)
    return folder


def copy_any(kind: str, seed: int, folder: Path) -> float:
    """Copy the experts of a random model; the relative error as above."""
    source, out = save_sparse(kind, seed, folder / "source"), folder / "out"
    choose = seeded(seed + 1000)
    symmetry = choose.choice(["break", "keep"])
    factor = choose.choice([2, 4] if symmetry == "break" else [2, 3])
    options = {"experts": f"x{factor}", "symmetry": symmetry, "seed": seed}
    growkit.grow(source, out, method="experts", verify=False, **options)
    return relative_error(source, out)
