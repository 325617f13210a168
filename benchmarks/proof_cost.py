"""What the proof adds to a growth, with everything at its default.

    python benchmarks/proof_cost.py [--pairs 3] [--against CHECKOUT] [--folder FOLDER]

A random bfloat16 Llama of the shape of a small model (hidden 576, ffn 1536, 30 layers, 9 heads, 3
KV heads, vocabulary 49152, tied) is grown by two, with the proof and without it, in turn; and, if
there is another checkout of growkit to compare with, with that as well. Whole processes are
measured: seconds by the clock, and of processors. Needs 3 GB of disk and memory, and prints
Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from statistics import median

from measuring import Run, apart, by_name, growkit, head, in_turn, machine, make_llama, ratio, row

SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of growkit")
    parser.add_argument("--folder", type=Path, help="where the models are made")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, grown = Path(scratch) / "source", Path(scratch) / "grown"
        apart(make_llama, source, "bfloat16", **SIZES)

        def grow(*options: str, checkout: Path | None = None) -> Run:
            shutil.rmtree(grown, ignore_errors=True)
            words = ["grow", source, grown, "--hidden", "x2", "--device", "cpu", "--json"]
            return growkit(*words, *options, checkout=checkout)

        calls = {"without the proof": lambda: grow("--no-verify"), "with its proof": grow}
        if chosen.against:
            other = chosen.against.resolve()
            calls["with its proof, the other checkout"] = lambda: grow(checkout=other)
        runs = in_turn(calls, chosen.pairs)
    print(f"{machine()}; medians of {chosen.pairs}")
    print(head("growth", "seconds", "of processors", "times the first"))
    first = by_name(runs["without the proof"], "seconds")
    for name, each in runs.items():
        clock, processors = by_name(each, "seconds"), by_name(each, "processors")
        figures = f"{median(clock):.1f}", f"{median(processors):.1f}", f"{ratio(clock, first):.2f}"
        print(row(name, *figures))


if __name__ == "__main__":
    main()
