"""Grow a model that is too large for one process: every rank makes its part and saves it.

    torchrun --nproc-per-node=4 examples/grow_on_many_ranks.py recipe.yaml my-larger-llama

The output is a folder of torch.distributed.checkpoint with ``config.json``: ``dcp.load`` reads it
on any mesh, and growkit reads it as a source. Each rank holds only its rows of every tensor. All
ranks must share the file system of the source and of the output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

from growkit.base.tensors import TORCH_NAMES
from growkit.distributed import GrownStorageReader


def grow(recipe: str, output: Path) -> None:
    reader = GrownStorageReader(recipe)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, info in reader.grown.target.tensors.items():
        dtype = getattr(torch, TORCH_NAMES[info.dtype])
        state[name] = empty(info.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
    dcp.load(state, storage_reader=reader)
    dcp.save(state, checkpoint_id=output)
    if dist.get_rank() == 0:
        (output / "config.json").write_text(json.dumps(reader.grown.config, indent=2))
        reader.grown.source.opened.carry_over(output)  # tokenizer, generation settings
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe, or the manifest of a model that was proved")
    parser.add_argument("output", type=Path, help="the folder to make")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    grow(arguments.recipe, arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
