"""What the proof adds to a growth, with everything at its default.

    python benchmarks/proof_cost.py [--pairs 3] [--against CHECKOUT] [--folder FOLDER]

A random bfloat16 Llama of the shape of a small model (hidden 576, ffn 1536, 30 layers, 9 heads, 3
KV heads, vocabulary 49152, tied) is grown by two, with the proof and without it, in turn; and, if
there is another checkout of growkit to compare with, with that as well, right after. Whole
processes are measured: seconds by the clock, and of processors. Needs 3 GB of disk and memory, and
prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path


def make_source(folder: Path) -> None:
    """Runs in a process of its own, so that its memory is given back."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
        else:
            scale = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter.data, std=scale)
    model.to(torch.bfloat16).save_pretrained(folder)


def grow(checkout: Path, source: Path, *options: str) -> tuple[float, float]:
    """Seconds of a growth, by the clock and of processors."""
    output = source.with_name("grown")
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "growkit", "grow", str(source), str(output)]
    command += ["--hidden", "x2", "--device", "cpu", "--json", *options]
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed in {checkout}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of growkit")
    parser.add_argument("--folder", type=Path, help="where the models are made")
    arguments = parser.parse_args()
    this = Path(__file__).parents[1]
    runs: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source = Path(scratch) / "source"
        maker = Process(target=make_source, args=(source,))
        maker.start()
        maker.join()
        for _ in range(arguments.pairs):
            runs.setdefault("without the proof", []).append(grow(this, source, "--no-verify"))
            runs.setdefault("with its proof", []).append(grow(this, source))
            if arguments.against:
                before = runs.setdefault("with its proof, the other checkout", [])
                before.append(grow(arguments.against.resolve(), source))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}")
    print(f"medians of {arguments.pairs}\n\n| growth | seconds | of processors | times the first |")
    print("| --- | --- | --- | --- |")
    for name, each in runs.items():
        clock, processors = (statistics.median(column) for column in zip(*each, strict=True))
        ratio = statistics.median(
            run[0] / first[0] for run, first in zip(each, runs["without the proof"], strict=True)
        )
        print(f"| {name} | {clock:.1f} | {processors:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
