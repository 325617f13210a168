"""Memory of the proof of a model and of what it grew to.

    python benchmarks/proof_memory.py [--pairs 12x1 24x1] [--families 6x1] [--folder FOLDER]

A random float32 Llama (hidden 2048, ffn 5632, 12 layers, 16 heads, vocabulary 32000: 3 GB) is grown
by two to 11 GB, without the proof. Then `growkit verify` runs on 8 random prompts of 512 tokens,
in a process of its own, whose peaks of resident memory are read from /proc. So it does for a pair
twice as deep, which should need the same. Files that are mapped count while they are looked at.

Then a GPT-NeoX, whose files call a tensor otherwise than its class, and a Mixtral, whose files hold
experts one by one where its class has them in one tensor, are verified against themselves, and so
is a Llama of as many parameters: on few tokens, all should need about the same.

Needs Linux and about 27 GB of disk, and prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from growth_speed import run

FAMILIES = ("Llama", "GPT-NeoX", "Mixtral")
"""Whose proofs are compared, the first with the others."""

FEW_TOKENS = ("--prompts", "1", "--length", "64")
"""These are compared on, with a small vocabulary: then layers are what takes memory."""


def config_of(family: str, layers: int, scale: int, vocabulary: int) -> Any:
    """Configs of models with as many parameters, but for biases, norms and routers."""
    from transformers import GPTNeoXConfig, LlamaConfig, MixtralConfig

    hidden, ffn = 2048 // scale, 5632 // scale
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "dtype": "float32",
    }
    if family == "GPT-NeoX":
        return GPTNeoXConfig(**sizes, intermediate_size=3 * ffn // 2)
    if family == "Mixtral":
        kinds = {"num_key_value_heads": 16, "head_dim": hidden // 16}
        return MixtralConfig(**sizes, **kinds, intermediate_size=ffn // 8, num_local_experts=8)
    return LlamaConfig(**sizes, intermediate_size=ffn)


def make_source(folder: Path, family: str, layers: int, scale: int, vocabulary: int) -> None:
    """Write a random model tensor by tensor as transformers names them, one shard for each."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, layers, scale, vocabulary))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = revert_weight_conversion(model, dict(model.named_parameters()))
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, (name, empty) in enumerate(tensors.items()):
        norm = empty.dim() == 1 and name.endswith("weight")
        tensor = torch.randn(empty.shape, generator=generator).mul_(0.1 if norm else 0.02)
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor + norm}, folder / file, {"format": "pt"})
        weight_map[name] = file
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peaks(source: Path, grown: Path, options: Sequence[str]) -> dict[str, float]:
    """Run the command here, and take the peak of every phase in GB."""
    from growkit.cli.app import main as growkit
    from growkit.engine.layerwise import Layerwise
    from growkit.proof import verdict

    found: dict[str, float] = {}
    now = ["start"]

    def look() -> None:
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
        found[now[-1]] = max(found.get(now[-1], 0.0), peak)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        look()
        now.append(name)
        try:
            yield
        finally:
            look()
            now.pop()

    def named(owner: Any, attribute: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, attribute)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with phase(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, wrapped)

    named(verdict._Proof, "weights", "weights")
    named(verdict._Proof, "strict", "strict float64")
    named(verdict._Proof, "native", "as it runs")
    named(Layerwise, "gradients", "gradients")
    sys.argv = ["growkit", "verify", str(source), str(grown), "--device", "cpu", *options]
    try:
        with phase("else"), redirect_stdout(sys.stderr):
            growkit()
    except SystemExit as ended:
        if ended.code:
            raise
    return found


def measure(folder: Path, layers: int, scale: int) -> list[str]:
    """Figures of one pair, as the cells of a table."""
    source, grown = folder / "source", folder / "grown"
    this = [sys.executable, __file__]
    subprocess.run([*this, "--make", source, "Llama", f"{layers}", f"{scale}", "32000"], check=True)
    growkit = [sys.executable, "-m", "growkit"]
    subprocess.run([*growkit, "grow", source, grown, "--hidden", "x2", "--no-verify"], check=True)
    proof = run([*this, "--peaks", str(source), str(grown)])
    phases = json.loads(proof.output)
    return [
        f"{2048 // scale}",
        f"{layers}",
        *(f"{gigabytes(each):.2f}" for each in (source, grown)),
        f"{proof.seconds:.0f}",
        f"{max(phases.values()):.2f}",
        described(phases),
    ]


def gigabytes(folder: Path) -> float:
    """Size of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9


def described(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {peak:.2f}" for name, peak in phases.items())


def compare_families(folder: Path | None, layers: int, scale: int) -> Iterator[list[str]]:
    """Figures of families whose files are not as their class is, as the cells of a table."""
    of_llama = 0.0
    this = [sys.executable, __file__]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            make = [*this, "--make", scratch, family, f"{layers}", f"{scale}", "4000"]
            subprocess.run(make, check=True)
            proof = run([*this, *FEW_TOKENS, "--peaks", scratch, scratch])
            phases = json.loads(proof.output)
            of_llama = of_llama or max(phases.values())
            yield [
                family,
                f"{2048 // scale}",
                f"{layers}",
                f"{gigabytes(Path(scratch)):.2f}",
                f"{proof.seconds:.0f}",
                f"{max(phases.values()):.2f}",
                f"{max(phases.values()) / of_llama:.2f}",
                described(phases),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pairs",
        nargs="*",
        default=["12x1", "24x1"],
        help="layers x what the width is divided by",
    )
    parser.add_argument(
        "--families",
        nargs="*",
        default=["6x1"],
        help="layers x what the width is divided by, of one model of each family",
    )
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--make", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", default=8, help=argparse.SUPPRESS)
    parser.add_argument("--length", default=512, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        folder, family, *sizes = arguments.make
        make_source(Path(folder), family, *map(int, sizes))
        return
    if arguments.peaks:
        few = ["--prompts", f"{arguments.prompts}", "--length", f"{arguments.length}"]
        print(json.dumps(peaks(*arguments.peaks, few)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}\n")
    if arguments.pairs:
        print_pairs(arguments)
    if arguments.families:
        print_families(arguments)


def print_pairs(arguments: argparse.Namespace) -> None:
    print("| hidden | layers | source, GB | target, GB | s | peak memory, GB | by phase, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for pair in arguments.pairs:
        layers, scale = map(int, pair.split("x"))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            print(f"| {' | '.join(measure(Path(scratch), layers, scale))} |", flush=True)


def print_families(arguments: argparse.Namespace) -> None:
    print("| family | hidden | layers | GB | s | peak memory, GB | × Llama's | by phase, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in arguments.families:
        layers, scale = map(int, model.split("x"))
        for cells in compare_families(arguments.folder, layers, scale):
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
