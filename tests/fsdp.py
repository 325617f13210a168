"""Several processes on a CPU, and accelerate that shards there with ``examples/fsdp2.yaml``."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import distributed, multiprocessing

import growkit


def on_ranks(work: Callable[..., Any], *given: Any, scratch: Path, count: int = 2) -> list[Any]:
    """What several processes return from ``work(*given)``; InputErrors as their sentences."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Forked, they need not import anything.
    asked = count, work, given, scratch
    multiprocessing.start_processes(_one, asked, nprocs=count, start_method="fork")
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(count)]


def shard_on_cpu() -> None:
    """Let accelerate shard, which it does only on an accelerator; for the rest of a process."""
    config = yaml.safe_load(Path("examples/fsdp2.yaml").read_text("utf-8"))["fsdp_config"]
    os.environ |= {key.upper(): str(value) for key, value in config.items()}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    backend = "gloo", DistributedType.MULTI_GPU
    PartialState._prepare_backend = lambda *_: backend  # type: ignore[method-assign]
    PartialState._reset_state()


def _one(
    rank: int, count: int, work: Callable[..., Any], given: tuple[Any, ...], scratch: Path
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate chooses a number, and warns of it
    distributed.init_process_group(
        "gloo", init_method=f"file://{scratch / 'meeting'}", rank=rank, world_size=count
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    try:
        found = work(*given)
    except growkit.InputError as error:
        found = str(error)
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
