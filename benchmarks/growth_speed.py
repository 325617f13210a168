"""Speed and memory of growing, against ``cp`` of the finished output; and what the proof adds.

    python benchmarks/growth_speed.py [--runs 5] [--folder FOLDER] [--before CHECKOUT]

A random float32 Llama (hidden 1024, ffn 2816, 24 layers, 16 heads, 8 KV heads, vocabulary 32000) is
grown by two, plainly (``keep``) and with random splits (``break``), without the proof. Each growth
is followed by a copy of its output; the ratio is taken pair by pair. Whole processes are measured,
with the operating system's own figures. Needs about 15 GB of disk, and prints Markdown.

Then a random bfloat16 Llama of the shape of a small model (hidden 576, ffn 1536, 30 layers, 9
heads, 3 KV heads, vocabulary 49152, tied) is grown by two, with the proof and without it, in turn,
everything at its default.

With ``--before``, a checkout of an earlier commit, each growth is followed by one of that code.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import median

from measuring import (
    Run,
    apart,
    by_name,
    growkit,
    head,
    in_turn,
    machine,
    make_llama,
    ratio,
    row,
    run,
)

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
PROVED = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def measure(source: Path, symmetry: str, runs: int, checkout: Path | None) -> list[str]:
    """Figures of one kind of growth, as the cells of a table."""
    grown, copied = source.with_name("grown"), source.with_name("copied")
    command = ["grow", source, grown, "--hidden", "x2", "--symmetry", symmetry]
    command += ["--no-verify", "--json"]
    found = []
    for _ in range(runs + 1):
        # Each writes where as much was freed, as long before: memory that went back to the host of
        # a virtual machine costs more to get than to write.
        shutil.rmtree(grown, ignore_errors=True)
        growth = growkit(*command)
        writing = json.loads(growth.output)["write_seconds"]
        waited = growth.seconds - writing
        shutil.rmtree(copied, ignore_errors=True)
        copying = run("sh", "-c", f'sleep {waited}; cp -r "{grown}" "{copied}"').seconds - waited
        before = None
        if checkout:
            shutil.rmtree(grown)
            before = json.loads(growkit(*command, checkout=checkout).output)["write_seconds"]
        found.append((growth.seconds, writing, copying, growth.peak, before))
    whole, writes, copies, peaks, earlier = zip(*found[1:], strict=True)  # the first warms up
    cells = [f"{median(each):.2f}" for each in (whole, writes, copies)]
    cells += [f"{ratio(each, copies):.2f}" for each in (whole, writes)]
    cells.append(f"{max(peaks) / 2**20:.0f}")
    return [symmetry, *cells, *([f"{ratio(writes, earlier):.2f}"] if checkout else [])]


def show_proof(folder: Path, runs: int, checkout: Path | None) -> None:
    """Growths with and without the proof."""
    source, grown = folder / "small", folder / "grown"
    apart(make_llama, source, "bfloat16", **PROVED)

    def grow(*options: str, checkout: Path | None = None) -> Run:
        shutil.rmtree(grown, ignore_errors=True)
        words = ["grow", source, grown, "--hidden", "x2", "--device", "cpu", "--json"]
        return growkit(*words, *options, checkout=checkout)

    calls = {"without the proof": lambda: grow("--no-verify"), "with its proof": grow}
    if checkout:
        calls["with its proof, before"] = lambda: grow(checkout=checkout)
    found = in_turn(calls, runs)
    print(head("growth", "seconds", "of processors", "times the first"))
    first = by_name(found["without the proof"], "seconds")
    for name, each in found.items():
        clock, processors = by_name(each, "seconds"), by_name(each, "processors")
        figures = f"{median(clock):.1f}", f"{median(processors):.1f}", f"{ratio(clock, first):.2f}"
        print(row(name, *figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source = Path(scratch) / "source"
        apart(make_llama, source, **SIZES)
        print(f"{machine()}; medians of {chosen.runs} pairs")
        columns = ["symmetry", "whole process, s", "writing, s", "cp, s", "process / cp"]
        columns += ["writing / cp", "peak memory, MiB"]
        print(head(*columns, *(["writing / writing before"] if chosen.before else [])))
        for symmetry in ("keep", "break"):
            print(row(*measure(source, symmetry, chosen.runs, chosen.before)), flush=True)
        show_proof(Path(scratch), chosen.runs, chosen.before)
    print(head("command", "seconds"))
    for words in ("--version", "--help", "grow --help"):
        seconds = median(growkit(*words.split()).seconds for _ in range(chosen.runs))
        print(row(f"`growkit {words}`", f"{seconds:.2f}"))


if __name__ == "__main__":
    main()
