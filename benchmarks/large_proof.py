"""Growth and proof of a large random Llama, in units of copying the same files.

    python benchmarks/large_proof.py [--device cuda] [--layers 28] [--folder FOLDER]

By default 3.2B parameters in bfloat16 become 12.1B. Needs 45 GB of disk in FOLDER. Prints a table:
seconds, processor seconds (user and system), peak memory of the process and of the device.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""Llama 3.2 3B."""


def make_source(folder: Path, layers: int, device: str) -> None:
    """Save a random Llama in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="5GB")


def timed(name: str, work: Callable[[], str]) -> None:
    """Do some work, and print its line."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    what = work()
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = sum(
        getattr(late, key) - getattr(early, key)
        for early, late in ((before, after), (children, done))
        for key in ("ru_utime", "ru_stime")
    )
    peak = after.ru_maxrss / 1e6
    print(f"| {name} | {seconds:.1f} | {used:.1f} | {peak:.1f} | {what} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        measure(Path(scratch), chosen)


def measure(scratch: Path, chosen: argparse.Namespace) -> None:
    """Make the models, and print the table."""
    import torch

    import growkit

    source, out, copy = (scratch / name for name in ("source", "out", "copy"))
    make_source(source, chosen.layers, chosen.device)
    if chosen.device != "cpu":
        torch.accelerator.empty_cache()
    print("| work | s | user + sys, s | peak memory, GB | result |\n" + "| --- " * 5 + "|")

    def grow() -> str:
        result = growkit.grow(source, out, hidden="x2", verify=False)
        return f"{result['source_parameters']:,} → {result['parameters']:,} parameters"

    def copy_files() -> str:
        subprocess.run(["cp", "-r", out, copy], check=True)
        os.sync()
        shutil.rmtree(copy)
        return f"{sum(file.stat().st_size for file in out.iterdir()) / 1e9:.1f} GB"

    def verify() -> str:
        if chosen.device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        result = growkit.verify(source, out, device=chosen.device)
        device = torch.accelerator.max_memory_allocated() / 1e9 if chosen.device != "cpu" else 0.0
        strict = result.sections.logits.strict_float64.relative
        caught = "caught" if result.sections.logits.negative_control_caught else "missed"
        (scratch / "result.json").write_text(json.dumps(result))
        return f"{result['verdict']}, {strict:.1e}, fault {caught}, {device:.1f} GB on the device"

    timed("`grow --no-verify`", grow)
    timed("`cp -r` and `sync`", copy_files)
    timed("`verify`", verify)


if __name__ == "__main__":
    main()
