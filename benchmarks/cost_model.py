"""What growing costs, fitted on three sizes and held against three that were not looked at.

    python benchmarks/cost_model.py [--folder FOLDER]

Random bfloat16 Llamas grow by two, without the proof, each as a process of its own. Time is what
the process computed (user and system time), since machines are shared: it is fitted by a constant
and a rate per byte written. Memory is the peak, fitted by a constant and a rate per byte of the
largest source tensor. Disk is what `growkit plan` says from ``config.json`` alone. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path

import numpy as np

FITTED = ((512, 12), (1024, 8), (1536, 10))
UNSEEN = ((768, 16), (1280, 10), (1792, 8))
"""Hidden size and number of layers."""

RECIPE = "source: {}\nsteps:\n  - grow: hypercloning\n    hidden: x2\noutput: {}\nverify: false\n"


@dataclass
class Case:
    """One size: what was planned, and what it took."""

    name: str
    written: int
    largest: int
    planned: int
    disk: int
    seconds: float
    memory: int


def make_source(folder: Path, hidden: int, layers: int) -> None:
    """Runs in a process of its own: a child's peak memory counts from its parent's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, hidden: int, layers: int) -> Case:
    """Make a model, plan its growth, and grow it."""
    from safetensors import safe_open

    source, grown = folder / "source", folder / "grown"
    for each in (source, grown):
        shutil.rmtree(each, ignore_errors=True)
    making = Process(target=make_source, args=(source, hidden, layers))
    making.start()
    making.join()
    bare, recipe = folder / "bare", folder / "recipe.yaml"
    bare.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", bare)
    recipe.write_text(RECIPE.format(source, grown))
    growkit = [sys.executable, "-m", "growkit"]
    plan = subprocess.run(
        [*growkit, "plan", str(recipe), "--source", str(bare), "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    planned = json.loads(plan.stdout)
    process = subprocess.Popen([*growkit, "run", str(recipe)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("growkit failed")
    largest = 0
    for file in source.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                largest = max(largest, 2 * int(np.prod(opened.get_slice(name).get_shape())))
    files = [file.stat().st_size for file in grown.rglob("*") if file.is_file()]
    return Case(
        f"{hidden} × {layers}",
        sum(file.stat().st_size for file in grown.glob("*.safetensors")),
        largest,
        planned["disk_needed"],
        sum(files),
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
    )


def fitted(sizes: list[int], figures: list[float]) -> tuple[float, float]:
    """The constant and the rate per byte that lie nearest, each figure relative to itself."""
    weights = 1 / np.array(figures)
    rows = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], axis=1)
    constant, rate = np.linalg.lstsq(rows * weights[:, None], np.ones(len(sizes)), rcond=None)[0]
    return float(constant), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="where to write, e.g. /dev/shm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        cases = [measure(Path(scratch), *size) for size in (*FITTED, *UNSEEN)]
    seen = cases[: len(FITTED)]
    start, per_byte = fitted([each.written for each in seen], [each.seconds for each in seen])
    base, held = fitted([each.largest for each in seen], [each.memory for each in seen])
    print(f"torch {version('torch')}, {platform.machine()}, {os.cpu_count()} cores\n")
    print(f"time: {start:.2f} s + {per_byte * 1e9:.3f} s per GB written (user and system)")
    print(f"memory: {base / 1e6:.0f} MB + {held:.2f} × the largest tensor of the source\n")
    figures = " | ".join(
        f"{each} | predicted | off" for each in ("time, s", "memory, MB", "disk, MB")
    )
    print(f"| hidden × layers | written, GB | | {figures} |")
    print("|" + " --- |" * 12)
    for each in cases:
        time, memory = start + per_byte * each.written, base + held * each.largest
        pairs = (
            (each.seconds, time, 1.0, "{:.2f}"),
            (each.memory, memory, 1e6, "{:.0f}"),
            (each.disk, each.planned, 1e6, "{:.0f}"),
        )
        cells = [
            f"{form.format(real / unit)} | {form.format(told / unit)} | {told / real - 1:+.1%}"
            for real, told, unit, form in pairs
        ]
        kind = "fitted" if each in seen else "unseen"
        print(f"| {each.name} | {each.written / 1e9:.2f} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
