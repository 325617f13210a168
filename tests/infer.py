"""Families inferred from nothing, of classes that growkit knows and of others.

``python -m tests.infer`` infers them all and prints a table; ``python -m tests.infer arcee`` some.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit.families.family import families
from tests.conftest import relative_error, save_random
from tests.sweeping import ROUNDING

KNOWN = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "olmo2",
    "gemma",
    "gemma2",
    "phi",
    "phi3",
    "gpt2",
    "opt",
    "cohere",
    "falcon",
    "stablelm",
    "granite",
    "starcoder2",
    "smollm3",
    "mixtral",
    "mamba",
]
OTHERS = [
    "apertus",
    "arcee",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cwm",
    "doge",
    "ernie4_5",
    "exaone4",
    "glm",
    "glm4",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "internlm3",
    "jais2",
    "minicpm3",
    "mpt",
    "nanochat",
    "nemotron",
    "persimmon",
    "seed_oss",
    "vaultgemma",
    "xglm",
    "youtu",
]

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


def line(kind: str, folder: Path) -> str:
    """What became of a type, as a row of a table."""
    started = time.time()
    source = random_model(kind, folder / "source")
    try:
        found = growkit.infer(source)
    except growkit.InputError as error:
        return f"| {kind} | no | {error} |"
    told = []
    for trial in found["trials"]:
        options = ", ".join(f"{name} {value}" for name, value in trial["options"].items())
        error = trial["error"]
        told.append(f"{options}: {'refused' if error is None else format(error, '.0e')}")
    settings = growkit.Settings(prompts=2, length=12)
    fixed = found["family"].get("fixed", {})
    size = {"hidden": "x4"} if "hidden" not in fixed else {"method": "depth", "layers": "x2"}
    family, out = found["family"], folder / "out"
    known = {kind for family in families().values() for kind in family.model_types}
    try:
        if kind in known:  # of which the proof uses growkit's own family
            growkit.grow(source, out, family=family, verify=False, **size)
            kept = relative_error(source, out) < ROUNDING
        else:
            made = growkit.grow(source, out, family=family, verify=settings, **size)
            proof = growkit.verify(source, out, settings=settings)
            kept = bool(made["kept"] and proof["kept"] and proof["weights_recovered"])
    except growkit.InputError as error:
        return f"| {kind} | no proof | {error} |"
    outcome = "works" if found["sure"] and kept else "partly" if kept else "broken"
    return f"| {kind} | {outcome} | {'; '.join(told)} | {time.time() - started:.0f} s |"


def main() -> None:
    """See the module."""
    known = {kind for family in families().values() for kind in family.model_types}
    for kind in sys.argv[1:] or [*KNOWN, *OTHERS]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = line(kind, Path(folder))
            except Exception as problem:
                row = f"| {kind} | FAULT | {type(problem).__name__}: {problem} |"
        sys.stdout.write(row + (" known |\n" if kind in known else "\n"))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
