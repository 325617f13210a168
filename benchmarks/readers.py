"""``benchmarks/results/readers.md``: what other programs compute from what growkit writes.

``python -m benchmarks.readers PROGRAM=PYTHON ...`` grows small random models of types whose layers
and experts programs read in different ways, lets each program of ``benchmarks/reading.py`` read
source and result in its own environment, and compares log-probabilities with transformers' in
strict float64, over a text of many windows. It fails where a program is further from transformers
with the result than twice as far as with the source. A program that has a format of its own also
reads the source as ``growkit convert --to FORMAT`` writes it. Types may be named, and models whose
configs are in ``tests/published.jsonl``, which are compared as their publishers write them.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoConfig

import growkit
from growkit.base.errors import InputError
from tests.files import edit_json
from tests.models import load_strict, logits_of, save_random
from tests.test_published import CONFIGS, save

FILE = Path(growkit.__file__).parents[1] / "benchmarks" / "results" / "readers.md"
TITLE = """# What other programs compute from grown models

Small random models in float32, windows of 8 tokens, texts of {length}. A cell has the largest
difference of log-probabilities to transformers in strict float64, of the source and of the result.
`python -m benchmarks.readers` makes this page. {machine}, {date}.
"""
TOKENS = 96
SPACING = 2e-6
"""What float32 loses in logits of this size, whatever the model is."""

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROWTHS: Mapping[str, Mapping[str, str]] = {
    "hidden x2": {"hidden": "x2"},
    "hidden x4": {"hidden": "x4"},
    "depth layers x2": {"method": "depth", "layers": "x2"},
    "depth layers x1.5": {"method": "depth", "layers": "x1.5"},
    "experts x2": {"method": "experts", "experts": "x2"},
}
"""Growths by name; those that are not exact for a model are left out."""

FORMATS = {"llama.cpp": "gguf", "litgpt": "litgpt", "mlx-lm": "mlx", "torchtune": "torchtune"}
"""The formats of programs, as ``convert --to`` names them."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
    },
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 8,
        **EXPERTS,
        "rope_scaling": {"rope_type": "default"},
    },
    "smollm3": {"no_rope_layer_interval": 4},
    "olmo3": {"sliding_window": 8, "rope_theta": 500000.0},
    "lfm2": {
        "full_attn_idxs": [1, 3],
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), 128),
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_norm_eps": 1e-5,
        "conv_L_cache": 3,
        "num_heads": 4,
    },
    "mixtral": {"sliding_window": None, **EXPERTS},
    "qwen2": {},
    "gemma": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
"""Keys of the config by type, beside those of ``SMALL``."""


def make(kind: str, folder: Path) -> Path:
    """A lively model, with the keys of its config as publishers write them."""
    if kind in CONFIGS:
        save(folder, CONFIGS[kind])
        return folder
    given = {**SMALL, **MODELS[kind]}
    save_random(folder, CONFIG_MAPPING[kind](**given), 0, torch.float32)
    with edit_json(folder / "config.json") as config:
        del config["rope_parameters"]
        config |= given
    return folder


def expected_of(folder: Path) -> Any:
    """The log-probabilities in strict float64; the tokens go into the folder."""
    model = load_strict(folder)
    ids = torch.randint(3, 128, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    (folder / "ids.json").write_text(json.dumps(ids[0].tolist()))
    return logits_of(model, ids).log_softmax(-1).numpy()


def read(program: str, python: str, expected: Mapping[Path, Any]) -> tuple[str, list[float | str]]:
    """Let a program read models.

    Args:
        program: its name in ``benchmarks/reading.py``.
        python: the interpreter of its environment.
        expected: log-probabilities by folder.

    Returns:
        Its version, and for each folder the largest difference, or why it does not read the model.
    """
    script = Path(__file__).with_name("reading.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script), program, *map(str, expected)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
    )
    words = done.stdout.split()
    found: list[float | str] = []
    for folder, logs in expected.items():
        answer, why = folder / "read.npz", folder / "read.txt"
        if answer.is_file():
            found.append(float(abs(np.load(answer)["logs"] - logs).max()))
            answer.unlink()
        else:
            told = done.stderr.strip().splitlines()[-1:]
            found.append(why.read_text("utf-8")[:80] if why.is_file() else f"ended: {told}")
        why.unlink(missing_ok=True)
    return words[0] if words else "", found


def rows(kind: str, pythons: Sequence[tuple[str, str]], scratch: Path) -> list[tuple[str, ...]]:
    """The rows of a type: growth, then a cell for each program; the first has their versions."""
    source = make(kind, scratch / "source" / kind)
    expected, made = {source: expected_of(source)}, []
    for said, growth in GROWTHS.items():
        out = scratch / said / kind
        try:
            result = growkit.grow(source, out, verify=False, **growth)
        except InputError:
            continue
        if result["promise"] == "exact":
            made.append((kind, said))
            expected[out] = expected_of(out)
    answers = [read(*each, expected) for each in pythons]
    heads = (f"{name} {answer[0]}" for (name, _), answer in zip(pythons, answers, strict=True))
    table: list[tuple[str, ...]] = [("type", "growth", *heads)]
    for at, first in enumerate(made, 1):
        table.append((*first, *(cell(found[0], found[at]) for _, found in answers)))
    read_sources = [found[0] for _, found in answers]
    own = (
        in_own_format(*program, source, expected[source], difference, scratch / "converted")
        for program, difference in zip(pythons, read_sources, strict=True)
    )
    table.append((kind, "none, in its own format", *own))
    sys.stdout.writelines(f"{' | '.join(row)}\n" for row in table[1:])
    return table


def in_own_format(
    program: str, python: str, source: Path, expected: Any, difference: float | str, scratch: Path
) -> str:
    """The cell of a source in the format of a program, with the config as transformers saves it."""
    if program not in FORMATS:
        return "-"
    out, saved = scratch / program / source.name, scratch / program / f"{source.name}-saved"
    shutil.copytree(source, saved)
    AutoConfig.from_pretrained(source).save_pretrained(saved)
    try:
        growkit.convert(saved, out, FORMATS[program], verify=False)
    except InputError as error:
        return f"refused: {error}".replace(str(saved), "it")[:80]
    shutil.copy(source / "ids.json", out)
    if isinstance(difference, str):  # it reads its own format alone
        _, (difference,) = read("transformers", sys.executable, {source: expected})
    _, (result,) = read(program, python, {out: expected})
    if isinstance(result, str) and result.startswith("LookupError"):
        return result.partition(": ")[2]
    return cell(difference, result)


def cell(source: float | str, result: float | str) -> str:
    """The differences of a source and of what was grown from it."""
    if isinstance(source, str):
        return f"not read, the source neither: {source}"
    if isinstance(result, str):
        return f"FAILS: {result}"
    wrong = " WRONG" if result > 2 * max(source, SPACING) else ""
    return f"{source:.1e} → {result:.1e}{wrong}"


def main(*words: str) -> int:
    pythons = [(name, python) for name, _, python in (w.partition("=") for w in words) if python]
    kinds = [word for word in words if "=" not in word] or [*MODELS]
    with TemporaryDirectory() as scratch:
        tables = [rows(kind, pythons, Path(scratch)) for kind in kinds]
    head, *_ = tables[0]
    found = [row for table in tables for row in table[1:]]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *found)]
    machine = f"{platform.system()} {platform.machine()}, torch {torch.__version__}"
    title = TITLE.format(length=TOKENS, machine=machine, date=datetime.now(UTC).date())
    FILE.write_text("\n".join([title, *lines, ""]), encoding="utf-8")
    return int(any(word in each for row in found for each in row for word in ("WRONG", "FAILS")))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
