"""What growing costs, fitted on three sizes and compared with three that were not looked at.

    python benchmarks/cost_model.py [--rounds 5] [--folder FOLDER]

Random bfloat16 Llamas grow by two, without the proof, each as a process of its own; one of every
size in turn, as many rounds as asked for, and of each size the median counts. Just before, a file
as large as the largest output is written and deleted: else the larger models alone would wait for
memory that the machine's host has taken back. Time is that of a clock, so nothing else should run;
it is fitted by a constant and a rate per byte written. Memory is the peak, fitted by a constant and
a rate per byte of the largest source tensor. What `growkit plan` prints from ``config.json`` alone
is next to both, and is all there is of the disk. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from measuring import Run, apart, by_name, growkit, head, machine, make_llama, row, size_of

FITTED = ((512, 12), (1024, 8), (1536, 10))
UNSEEN = ((768, 16), (1280, 10), (1792, 8))
"""Hidden size and number of layers."""

RECIPE = "source: {}\nsteps:\n  - grow: hypercloning\n    hidden: x2\noutput: {}\nverify: false\n"
VOCABULARY = 32000


@dataclass
class Case:
    """One size: what was planned, and what it took in each round."""

    name: str
    folder: Path
    largest: int
    plan: dict[str, float]
    written: int = 0
    disk: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """By the clock, the median of all rounds."""
        return median(by_name(self.runs, "seconds"))

    @property
    def memory(self) -> float:
        """Bytes at the peak, the median of all rounds."""
        return median(by_name(self.runs, "peak"))


def planned(folder: Path, hidden: int, layers: int) -> Case:
    """Make a model, and plan its growth from its config alone."""
    folder = folder / f"{hidden}-{layers}"
    source, bare, recipe = folder / "source", folder / "bare", folder / "recipe.yaml"
    bare.mkdir(parents=True)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    widths = {"intermediate_size": hidden * 11 // 4}
    apart(make_llama, source, "bfloat16", **sizes, **heads, **widths)
    shutil.copy(source / "config.json", bare)
    recipe.write_text(RECIPE.format(source, folder / "grown"))
    plan = json.loads(growkit("plan", recipe, "--source", bare, "--json").output)
    return Case(f"{hidden} × {layers}", folder, 2 * VOCABULARY * hidden, plan)


def measure(case: Case) -> None:
    """Grow a model once."""
    grown = case.folder / "grown"
    case.runs.append(growkit("run", case.folder / "recipe.yaml"))
    case.written, case.disk = size_of(grown), size_of(grown, "*")
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
    """The nearest constant and rate per byte, with each figure relative to itself."""
    weights = 1 / np.array(figures)
    rows = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], axis=1)
    constant, rate = np.linalg.lstsq(rows * weights[:, None], np.ones(len(sizes)), rcond=None)[0]
    return float(constant), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write, e.g. /dev/shm")
    parser.add_argument("--rounds", type=int, default=5, help="growths of every size")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        cases = [planned(Path(scratch), *size) for size in (*FITTED, *UNSEEN)]
        most = max(int(case.plan["disk_needed"]) for case in cases)
        for _ in range(chosen.rounds):
            for case in cases:
                make_room(Path(scratch), most)
                measure(case)
    seen = cases[: len(FITTED)]
    start, per_byte = fitted(by_name(seen, "written"), by_name(seen, "seconds"))
    base, held = fitted(by_name(seen, "largest"), by_name(seen, "memory"))
    print(f"{machine()}; medians of {chosen.rounds} rounds\n")
    print(f"time: {start:.2f} s + {per_byte * 1e9:.3f} s per GB written\n")
    print(f"memory: {base / 1e6:.0f} MB + {held:.2f} × the largest tensor of the source")
    columns = ["time, s", "fit", "off", "plan", "off", "memory, MB", "fit", "off", "plan", "off"]
    print(head("hidden × layers", "written, GB", "", *columns, "disk, MB", "plan", "off"))
    for each in cases:
        fits = (start + per_byte * each.written, base + held * each.largest)
        plans = [each.plan[key] for key in ("write_seconds", "memory", "disk_needed")]
        cells = []
        for real, unit, form, guesses in (
            (each.seconds, 1.0, "{:.2f}", (fits[0], plans[0])),
            (each.memory, 1e6, "{:.0f}", (fits[1], plans[1])),
            (each.disk, 1e6, "{:.0f}", (plans[2],)),
        ):
            cells.append(form.format(real / unit))
            for guess in guesses:
                cells += [form.format(guess / unit), f"{guess / real - 1:+.1%}"]
        kind = "fitted" if each in seen else "unseen"
        print(row(each.name, f"{each.written / 1e9:.2f}", kind, *cells))


if __name__ == "__main__":
    main()
