"""Tiny random models of types whose families are inferred."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from tests.conftest import save_random

OTHERS = (
    *("apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cwm", "doge", "ernie4_5"),
    *("exaone4", "glm", "glm4", "gpt_bigcode", "gpt_neo", "gptj", "helium", "hunyuan_v1_dense"),
    *("hyperclovax", "internlm3", "jais2", "minicpm3", "mpt", "nanochat", "nemotron"),
    *("persimmon", "seed_oss", "vaultgemma", "xglm", "youtu"),
)

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 64,
    "intermediate_size": 36,
    "ffn_dim": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rotary_dim": 8,
    "attention_types": [[["global", "local"], 1]],
}


def random_model(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """A tiny random model of a type, with the sizes that its config knows."""
    empty = CONFIG_MAPPING[kind]()
    names = {key: empty.attribute_map.get(key, key) for key in SIZES}
    has = empty.to_dict()
    known = {names[key]: value for key, value in SIZES.items() if names[key] in has}
    known |= dict.fromkeys((key for key in has if key.endswith("_token_id")), 1)
    return save_random(folder, CONFIG_MAPPING[kind](**(known | more)), seed, torch.float32)
