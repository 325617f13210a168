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
import shutil
import tempfile
from pathlib import Path

from measuring import apart, growkit, head, machine, make_llama, row

SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
}


def make(folder: Path, layers: int) -> None:
    """A model and its states."""
    import torch
    import torch.distributed.checkpoint as dcp

    model = make_llama(folder / "source", **SIZES, num_hidden_layers=layers)
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
    given = ["--optimizer", folder / state] if state else []
    plain = ["--hidden", "x2", "--symmetry", "keep", "--no-verify", "--json"]
    found = growkit("grow", folder / "source", out, *plain, *given)
    result = json.loads(found.output)
    written = (result["bytes"] + (result["optimizer"]["bytes"] if state else 0)) / 1e9
    largest = 4 * SIZES["vocab_size"] * 2 * SIZES["hidden_size"]
    shutil.rmtree(out)
    return [
        f"{result['source_parameters'] / 1e6:.0f}M",
        state or "none",
        *(f"{written:.2f}", f"{found.seconds:.1f}", f"{found.seconds / written:.1f}"),
        *(f"{found.peak / 2**20:.0f}", f"{found.peak / largest:.0f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    chosen = parser.parse_args()
    print(machine())
    columns = ["source", "state", "written, GB", "whole process, s", "s per GB"]
    print(head(*columns, "peak memory, MiB", "in largest tensors"))
    for layers in chosen.layers:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
            apart(make, Path(scratch), layers)
            for state in (None, "optimizer.pt", "distributed"):
                print(row(*measure(Path(scratch), state)), flush=True)


if __name__ == "__main__":
    main()
