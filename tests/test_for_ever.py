"""A recipe makes the same bits for ever: those that earlier versions have recorded.

Every line of ``recorded.jsonl`` is a case: a type and its config, the dtype, the steps of a recipe,
and what it made. Weights of sources are plain numbers, which every machine draws alike. ``python -m
tests.test_for_ever`` records every case anew: only where a promise is given up, or for new lines.
"""

import hashlib
import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import growkit
from growkit.planning.recipe import parse_recipe
from tests.files import edit_weights
from tests.models import save_random

RECORDED = Path(__file__).with_name("recorded.jsonl")
CASES = [json.loads(line) for line in RECORDED.read_text("utf-8").splitlines()]
NOT_REPEATABLE = {"shared-diff", "mla"}
"""Conversions whose last bits depend on the machine, as the documents say."""


def save_plain(folder: Path, kind: str, config: dict[str, Any], dtype: str) -> Path:
    """A model of numbers that all dtypes hold."""
    save_random(folder, CONFIG_MAPPING[kind](**config), dtype=getattr(torch, dtype))
    with edit_weights(folder) as weights:
        for name, tensor in weights.items():
            numbers = Random(name).choices(range(-64, 65), k=tensor.numel())
            centre = 65 if tensor.dim() == 1 and "lambda" not in name else 0
            plain = (torch.tensor(numbers).view(tensor.shape) + centre) / 256
            tensor.copy_(plain if tensor.is_floating_point() else tensor)
    return folder


def digest(content: Any) -> str:
    """Of JSON, in which floats have nine digits."""
    rounded = json.loads(json.dumps(content), parse_float=lambda text: f"{float(text):.9g}")
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:12]


def digest_of_weights(folder: Path) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def made(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A case as it is recorded, with what its recipe makes today."""
    source = save_plain(folder / "source", case["kind"], case["config"], case["dtype"])
    content = {"source": str(source), "output": str(folder / "out"), "seed": 7, "verify": False}
    result = growkit.run(parse_recipe({**content, "steps": case["steps"]}, "the case"))
    manifest = json.loads((folder / "out" / "growkit.json").read_text("utf-8"))
    same = not NOT_REPEATABLE & {name for step in case["steps"] for name in step.values()}
    return case | {
        "steps": manifest["recipe"]["steps"],
        "weights": digest_of_weights(folder / "out") if same else None,
        "updates": digest(manifest["updates"] and manifest["updates"]["groups"]),
        "becomes": {
            change["key"]: change["after"]
            for change in result["config"]
            if change["key"] != "auto_map"  # names files of today
        },
        "told": [manifest[key] for key in ("promise", "copies", "dtype", "parameters", "bytes")],
        "dropped": sorted(manifest["dropped"]),
    }


@pytest.mark.sampled(24)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number]["kind"])
def test_a_recipe_makes_what_it_made(number: int, tmp_path: Path) -> None:
    assert made(CASES[number], tmp_path) == CASES[number]


def main() -> None:
    lines = []
    for case in CASES:
        with TemporaryDirectory() as folder:
            lines.append(json.dumps(made(case, Path(folder))))
    RECORDED.write_text("".join(f"{line}\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
