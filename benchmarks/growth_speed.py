"""Speed and memory of growing, against ``cp`` of the finished output in the same run.

    python benchmarks/growth_speed.py [--runs 5] [--folder FOLDER] [--before CHECKOUT]

A random float32 Llama (hidden 1024, ffn 2816, 24 layers, 16 heads, 8 KV heads, vocabulary 32000) is
grown by two, plainly (``keep``) and with random splits (``break``), without the proof. Each growth
is followed by a copy of its output; the ratio is taken pair by pair. Whole processes are measured,
with the operating system's own figures. Needs about 15 GB of disk, and prints Markdown.

With ``--before``, a checkout of an earlier commit, each growth is followed by one of that code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path


@dataclass
class Run:
    """One finished process."""

    seconds: float
    mebibytes: float
    output: str


def run(command: Sequence[str], checkout: Path | None = None) -> Run:
    """Run a command, by the code of another checkout if one is given."""
    os.sync()  # nothing of the process before is still on its way to the disk
    started = time.perf_counter()
    search = {"PYTHONPATH": str(checkout)} if checkout else {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | search, cwd=checkout
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return Run(seconds, usage.ru_maxrss / 1024, output)


def make_source(folder: Path) -> None:
    """Runs in a process of its own: a child's peak memory counts from its parent's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=8,
        )
    )
    model.save_pretrained(folder)


def measure(
    source: Path, scratch: Path, symmetry: str, runs: int, checkout: Path | None
) -> list[str]:
    """Figures of one kind of growth, as the cells of a table."""
    grown, copied = scratch / "grown", scratch / "copied"
    whole, writing, copying, memory = [], [], [], []
    before: list[float] = []
    for number in range(runs + 1):
        # Each writes where as much was freed, as long before: memory that went back to the host of
        # a virtual machine costs more to get than to write.
        shutil.rmtree(grown, ignore_errors=True)
        command = [sys.executable, "-m", "growkit", "grow", str(source), str(grown)]
        command += ["--hidden", "x2", "--symmetry", symmetry, "--no-verify", "--json"]
        growth = run(command)
        written = json.loads(growth.output)["write_seconds"]
        before_writing = growth.seconds - written
        shutil.rmtree(copied, ignore_errors=True)
        copy = run(["sh", "-c", f'sleep {before_writing}; cp -r "{grown}" "{copied}"'])
        earlier = None
        if checkout:
            shutil.rmtree(grown)
            earlier = json.loads(run(command, checkout).output)["write_seconds"]
        if number:  # the first pair only warms up
            whole.append(growth.seconds)
            writing.append(written)
            copying.append(copy.seconds - before_writing)
            memory.append(growth.mebibytes)
            before += [earlier] if checkout else []
    middle = statistics.median
    return [
        symmetry,
        f"{middle(whole):.2f}",
        f"{middle(writing):.2f}",
        f"{middle(copying):.2f}",
        f"{middle(w / c for w, c in zip(whole, copying, strict=True)):.2f}",
        f"{middle(w / c for w, c in zip(writing, copying, strict=True)):.2f}",
        f"{max(memory):.0f}",
        *([f"{middle(w / b for w, b in zip(writing, before, strict=True)):.2f}"] if before else []),
    ]


def start_up(runs: int) -> list[tuple[str, float]]:
    commands = [["--version"], ["--help"], ["grow", "--help"]]
    return [
        (
            " ".join(["growkit", *command]),
            statistics.median(
                run([sys.executable, "-m", "growkit", *command]).seconds for _ in range(runs)
            ),
        )
        for command in commands
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source = Path(scratch) / "source"
        maker = Process(target=make_source, args=(source,))
        maker.start()
        maker.join()
        plan = [
            "grow",
            str(source),
            str(source) + "-grown",
            "--hidden",
            "x2",
            "--dry-run",
            "--json",
        ]
        planned = json.loads(run([sys.executable, "-m", "growkit", *plan]).output)
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}")
        print(
            f"{planned['source_parameters']:,} -> {planned['parameters']:,} parameters, "
            f"{planned['bytes'] / 1e9:.2f} GB; medians of {arguments.runs} pairs\n"
        )
        columns = ["symmetry", "whole process, s", "writing, s", "cp, s", "process / cp"]
        columns += ["writing / cp", "peak memory, MiB"]
        columns += ["writing / writing before"] if arguments.before else []
        print(f"| {' | '.join(columns)} |")
        print(f"|{' --- |' * len(columns)}")
        for symmetry in ("keep", "break"):
            cells = measure(source, Path(scratch), symmetry, arguments.runs, arguments.before)
            print(f"| {' | '.join(cells)} |", flush=True)
    print("\n| command | seconds |\n| --- | --- |")
    for command, seconds in start_up(arguments.runs):
        print(f"| `{command}` | {seconds:.2f} |")


if __name__ == "__main__":
    main()
