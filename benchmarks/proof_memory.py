"""Memory of the proof of a model and of what it grew to.

    python benchmarks/proof_memory.py [--pairs 12x1 24x1] [--folder FOLDER]

A random float32 Llama (hidden 2048, ffn 5632, 12 layers, 16 heads, vocabulary 32000: 3 GB) is grown
by two to 11 GB, without the proof. Then `growkit verify` runs on 8 random prompts of 512 tokens,
in a process of its own, whose peaks of resident memory are read from /proc. So it does for a pair
twice as deep, which should need the same. Files that are mapped count while they are looked at.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from growth_speed import run


def make_source(folder: Path, layers: int, scale: int) -> None:
    """Write a random Llama tensor by tensor, one shard for each."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048 // scale,
        intermediate_size=5632 // scale,
        num_hidden_layers=layers,
        num_attention_heads=16,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    weight_map = {}
    generator = torch.Generator().manual_seed(0)
    for number, (name, parameter) in enumerate(parameters.items()):
        norm = parameter.dim() == 1
        tensor = torch.randn(parameter.shape, generator=generator).mul_(0.1 if norm else 0.02)
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor + norm}, folder / file, {"format": "pt"})
        weight_map[name] = file
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peaks(source: Path, grown: Path) -> dict[str, float]:
    """Run the command here, and take the peak of every phase in GB."""
    from growkit.cli import main as growkit
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
    sys.argv = ["growkit", "verify", str(source), str(grown), "--device", "cpu"]
    sys.argv += ["--prompts", "8", "--length", "512"]
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
    subprocess.run([*this, "--make", source, f"{layers}", f"{scale}"], check=True)
    growkit = [sys.executable, "-m", "growkit"]
    subprocess.run([*growkit, "grow", source, grown, "--hidden", "x2", "--no-verify"], check=True)
    proof = run([*this, "--peaks", str(source), str(grown)])
    sizes = [sum(f.stat().st_size for f in each.glob("*.safetensors")) for each in (source, grown)]
    phases = json.loads(proof.output)
    return [
        f"{2048 // scale}",
        f"{layers}",
        *(f"{size / 1e9:.2f}" for size in sizes),
        f"{proof.seconds:.0f}",
        f"{max(phases.values()):.2f}",
        ", ".join(f"{name} {peak:.2f}" for name, peak in phases.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pairs",
        nargs="*",
        default=["12x1", "24x1"],
        help="layers x what the width is divided by",
    )
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        folder, layers, scale = arguments.make
        make_source(Path(folder), int(layers), int(scale))
        return
    if arguments.peaks:
        print(json.dumps(peaks(*arguments.peaks)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}\n")
    print("| hidden | layers | source, GB | target, GB | s | peak memory, GB | by phase, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for pair in arguments.pairs:
        layers, scale = map(int, pair.split("x"))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            print(f"| {' | '.join(measure(Path(scratch), layers, scale))} |", flush=True)


if __name__ == "__main__":
    main()
