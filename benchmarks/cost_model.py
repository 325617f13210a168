"""What growing costs, fitted on three sizes and held against three that were not looked at.

    python benchmarks/cost_model.py [--rounds 5] [--folder FOLDER]

Random bfloat16 Llamas grow by two, without the proof, each as a process of its own; one of every
size in turn, as many rounds as asked for, and of each size the median counts. Just before, a file
as large as the largest output is written and deleted: else the larger models alone would wait for
memory that the machine's host has taken back. Time is that of a clock, so nothing else should run;
it is fitted by a constant and a rate per byte written. Memory is the peak, fitted by a constant and
a rate per byte of the largest source tensor. What `growkit plan` says from ``config.json`` alone
stands beside both, and is all there is of the disk. Prints Markdown.
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
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path

import numpy as np

FITTED = ((512, 12), (1024, 8), (1536, 10))
UNSEEN = ((768, 16), (1280, 10), (1792, 8))
"""Hidden size and number of layers."""

GROWKIT = [sys.executable, "-m", "growkit"]
RECIPE = "source: {}\nsteps:\n  - grow: hypercloning\n    hidden: x2\noutput: {}\nverify: false\n"


@dataclass
class Case:
    """One size: what was planned, and what it took in each round."""

    name: str
    folder: Path
    largest: int
    plan: dict[str, float]
    written: int = 0
    disk: int = 0
    times: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """By the clock, the median of all rounds."""
        return statistics.median(self.times)

    @property
    def memory(self) -> float:
        """Bytes at the peak, the median of all rounds."""
        return statistics.median(self.peaks)


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


def planned(folder: Path, hidden: int, layers: int) -> Case:
    """Make a model, and plan its growth from its config alone."""
    from safetensors import safe_open

    folder = folder / f"{hidden}-{layers}"
    source, bare, recipe = folder / "source", folder / "bare", folder / "recipe.yaml"
    bare.mkdir(parents=True)
    making = Process(target=make_source, args=(source, hidden, layers))
    making.start()
    making.join()
    shutil.copy(source / "config.json", bare)
    recipe.write_text(RECIPE.format(source, folder / "grown"))
    plan = subprocess.run(
        [*GROWKIT, "plan", str(recipe), "--source", str(bare), "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    largest = 0
    for file in source.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                largest = max(largest, 2 * int(np.prod(opened.get_slice(name).get_shape())))
    return Case(f"{hidden} × {layers}", folder, largest, json.loads(plan.stdout))


def measure(case: Case) -> None:
    """Grow a model once."""
    grown = case.folder / "grown"
    os.sync()  # nothing of the model before is still on its way to the disk
    started = time.perf_counter()
    process = subprocess.Popen(
        [*GROWKIT, "run", str(case.folder / "recipe.yaml")], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("growkit failed")
    case.times.append(time.perf_counter() - started)
    case.peaks.append(usage.ru_maxrss * 1024)
    case.written = sum(file.stat().st_size for file in grown.glob("*.safetensors"))
    case.disk = sum(file.stat().st_size for file in grown.rglob("*") if file.is_file())
    shutil.rmtree(grown)


def make_room(folder: Path, size: int) -> None:
    """Let the machine have as much memory at hand as a file takes."""
    file = folder / "room"
    with file.open("wb") as opened:
        for _ in range(0, size, 1 << 24):
            opened.write(bytes(1 << 24))
    os.sync()
    file.unlink()


def fitted(sizes: Sequence[int], figures: Sequence[float]) -> tuple[float, float]:
    """The constant and the rate per byte that lie nearest, each figure relative to itself."""
    weights = 1 / np.array(figures)
    rows = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], axis=1)
    constant, rate = np.linalg.lstsq(rows * weights[:, None], np.ones(len(sizes)), rcond=None)[0]
    return float(constant), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="where to write, e.g. /dev/shm")
    parser.add_argument("--rounds", type=int, default=5, help="growths of every size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        cases = [planned(Path(scratch), *size) for size in (*FITTED, *UNSEEN)]
        most = max(int(case.plan["disk_needed"]) for case in cases)
        for _ in range(options.rounds):
            for case in cases:
                make_room(Path(scratch), most)
                measure(case)
    seen = cases[: len(FITTED)]
    start, per_byte = fitted([each.written for each in seen], [each.seconds for each in seen])
    base, held = fitted([each.largest for each in seen], [each.memory for each in seen])
    machine = f"torch {version('torch')}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}; medians of {options.rounds} rounds\n")
    print(f"time: {start:.2f} s + {per_byte * 1e9:.3f} s per GB written")
    print(f"memory: {base / 1e6:.0f} MB + {held:.2f} × the largest tensor of the source\n")
    columns = ["time, s", "fit", "off", "plan", "off", "memory, MB", "fit", "off", "plan", "off"]
    columns += ["disk, MB", "plan", "off"]
    print(f"| hidden × layers | written, GB | | {' | '.join(columns)} |")
    print("|" + " --- |" * (3 + len(columns)))
    for each in cases:
        fits = (start + per_byte * each.written, base + held * each.largest)
        plans = [each.plan[key] for key in ("write_seconds", "memory", "disk_needed")]
        rows = (
            (each.seconds, 1.0, "{:.2f}", (fits[0], plans[0])),
            (each.memory, 1e6, "{:.0f}", (fits[1], plans[1])),
            (each.disk, 1e6, "{:.0f}", (plans[2],)),
        )
        cells = []
        for real, unit, form, told in rows:
            cells.append(form.format(real / unit))
            for guess in told:
                cells += [form.format(guess / unit), f"{guess / real - 1:+.1%}"]
        kind = "fitted" if each in seen else "unseen"
        print(f"| {each.name} | {each.written / 1e9:.2f} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
