"""Speed of the proof, against what people do by hand.

    python benchmarks/proof_speed.py [--pairs 5] [--folder FOLDER]

By hand: both models are loaded with transformers, in float64 and then in the storage dtype, run on
the same tokens, and what verify prints of the logits is taken: largest difference, scale, KL, top-1
agreement, losses. The same work of growkit is the comparison alone: the same prompts in both
dtypes, one layer at a time. The whole ``growkit verify`` also looks at every weight, asks in
several more ways, carries a fault and the source's rounding along, and takes gradients. A random
float32 Llama (hidden 1024, ffn 2816, 3 layers, 16 heads, vocabulary 8000) is grown by two. They
run in turn, as processes of their own; ratios are taken run by run. Needs 2 GB of disk and 6 GB of
memory, and prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from growth_speed import run

PROMPTS, LENGTH = 8, 512  # what `growkit verify` does by default


def make_source(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=3,
        num_attention_heads=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def by_hand(source: Path, target: Path) -> float:
    """What growkit is not used for: nothing but transformers and torch."""
    import torch
    from torch.nn.functional import cross_entropy, kl_div
    from transformers import AutoModelForCausalLM

    ids = torch.randint(8000, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))
    largest = scale = kl = agreeing = losses = 0.0
    for dtype in (torch.float64, torch.float32):
        models = [AutoModelForCausalLM.from_pretrained(f, dtype=dtype) for f in (source, target)]
        for prompt in ids:
            with torch.no_grad():
                one, other = (model(prompt[None]).logits[0].double() for model in models)
            largest = max(largest, float((one - other).abs().max()))
            scale += float(one.square().mean())
            log_p, log_q = one.log_softmax(-1), other.log_softmax(-1)
            kl += float(kl_div(log_q, log_p, log_target=True, reduction="sum"))
            agreeing += float((one.argmax(-1) == other.argmax(-1)).sum())
            losses += sum(float(cross_entropy(each[:-1], prompt[1:])) for each in (one, other))
    print(largest, scale, kl, agreeing, losses)
    return largest


def comparison_alone(source: Path, target: Path) -> float:
    """The same with the parts of growkit's proof."""
    import torch

    from growkit.checkpoint.reading import Checkpoint
    from growkit.proof import Settings
    from growkit.proof.comparison import compare
    from growkit.proof.layerwise import Layerwise
    from growkit.proof.modes import modes
    from growkit.proof.prompts import make_prompts
    from growkit.proof.strict import strict_float64

    both = Checkpoint(source), Checkpoint(target)
    settings = Settings(prompts=PROMPTS, length=LENGTH)
    asked = modes(make_prompts(settings, source, both[0].config).windows, both[1].config)[:1]

    def largest(dtype: torch.dtype) -> float:
        one, other = (Layerwise(each, dtype, torch.device("cpu"), None) for each in both)
        return compare(one, other, asked, lambda: None).prefill.largest

    with strict_float64():
        strict = largest(torch.float64)
    return max(strict, largest(torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--by-hand", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        print(by_hand(*arguments.by_hand))
        return
    if arguments.alone:
        print(comparison_alone(*arguments.alone))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, target = f"{scratch}/source", f"{scratch}/target"
        make_source(Path(source))
        growkit = [sys.executable, "-m", "growkit"]
        grow = [*growkit, "grow", source, target, "--hidden", "x2", "--no-verify"]
        subprocess.run(grow, check=True)
        amount = ["--prompts", f"{PROMPTS}", "--length", f"{LENGTH}", "--device", "cpu"]
        commands = {
            "by hand": [sys.executable, __file__, "--by-hand", source, target],
            "the comparison alone": [sys.executable, __file__, "--alone", source, target],
            "`growkit verify`": [*growkit, "verify", source, target, *amount],
        }
        runs = [
            {name: run(command) for name, command in commands.items()}
            for _ in range(arguments.pairs + 1)
        ][1:]  # the first only warms up
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}")
    print(f"{PROMPTS} prompts of {LENGTH} tokens; medians of {arguments.pairs} rounds\n")
    print("| | seconds | times by hand | peak memory, GB |\n| --- | --- | --- | --- |")
    for name in commands:
        seconds = statistics.median(each[name].seconds for each in runs)
        ratio = statistics.median(each[name].seconds / each["by hand"].seconds for each in runs)
        memory = max(each[name].mebibytes for each in runs) * 2**20 / 1e9
        print(f"| {name} | {seconds:.1f} | {ratio:.2f} | {memory:.2f} |")


if __name__ == "__main__":
    main()
