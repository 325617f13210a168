"""Memory and time of growing the state of an optimizer, in all formats and three sizes.

    python benchmarks/optimizer_state.py [--folder FOLDER] [--layers 4 8 16]

A random float32 Llama (hidden 512, ffn 1408, 8 heads, vocabulary 8000) with an AdamW state is grown
by two, without and with the state, without the proof. Whole processes are measured, with the
operating system's own figures; time is also given for each GB that is written. Needs about 8 GB of
disk, and prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import version
from multiprocessing import Process
from pathlib import Path

from growth_speed import run

FORMATS = ("optimizer.pt", "distributed")


def make(folder: Path, layers: int) -> None:
    """A model and its states; in a process of its own, whose memory counts for no other."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "source")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    flat: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter]
        flat |= {f"state.{name}.{kind}": value for kind, value in kept.items()}
        flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    dcp.save({"optimizer": flat}, checkpoint_id=folder / "distributed", no_dist=True)


def measure(folder: Path, state: str | None) -> list[str]:
    """The cells of a table."""
    out = folder / "grown"
    command = [sys.executable, "-m", "growkit", "grow", str(folder / "source"), str(out)]
    command += ["--hidden", "x2", "--symmetry", "keep", "--no-verify", "--json"]
    found = run([*command, *(["--optimizer", str(folder / state)] if state else [])])
    result = json.loads(found.output)
    written = result["bytes"] + (result["optimizer"]["bytes"] if state else 0)
    shutil.rmtree(out)
    largest = 8000 * 1024 * 4 / 2**20
    return [
        f"{result['source_parameters'] / 1e6:.0f}M",
        state or "none",
        f"{written / 1e9:.2f}",
        f"{found.seconds:.1f}",
        f"{found.seconds / (written / 1e9):.1f}",
        f"{found.mebibytes:.0f}",
        f"{found.mebibytes / largest:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}\n")
    columns = ["source", "state", "written, GB", "whole process, s", "s per GB"]
    columns += ["peak memory, MiB", "in largest tensors"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            maker = Process(target=make, args=(Path(scratch), layers))
            maker.start()
            maker.join()
            for state in (None, *FORMATS):
                print(f"| {' | '.join(measure(Path(scratch), state))} |", flush=True)


if __name__ == "__main__":
    main()
