"""Grown models that are loaded over several processes, held against the written folders.

    python -m tests.loading [--sample] [--memory]

Four processes (gloo, on a CPU) load every model through torch.distributed.checkpoint and through
transformers, over several meshes: every shard must be, bit for bit, that part of what transformers
loads of the folder. Optimizers are loaded likewise, and a step on all processes is a step on one.
``--memory`` measures the peak of every process with a larger model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import growkit
from growkit.distributed import GrownStorageReader
from growkit.distributed.grown import Entry
from growkit.engine.oracle import parsed
from tests.conftest import load_strict, save_model
from tests.optimizer_state import FLAT, load_distributed, save_distributed, step, trained

RANKS = 4
SIZES = {
    "vocab_size": 30,  # of which four processes have unequal parts
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, **SIZES}
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "hypercloning": ("llama", BFLOAT16, [{"grow": "hypercloning", "hidden": "x2"}]),
    "group-diff": (
        "diffllama",
        BFLOAT16 | {"tie_word_embeddings": True},
        [{"grow": "group-diff", "hidden": "x2", "signal_heads": "x4"}],
    ),
    "depth": ("llama", BFLOAT16, [{"grow": "depth", "layers": 3}]),
    "upcycling": (
        "mistral",
        BFLOAT16,
        [{"grow": "upcycle", "experts": 4, "top_k": 2}],
    ),
    "grow-convert": (
        "llama",
        SIZES,
        [{"grow": "hypercloning", "hidden": "x2", "ffn": "x2"}, {"convert": "diff-v2"}],
    ),
}
"""Models, what their sources are, and what is done to these."""


def make(name: str, folder: Path, **more: Any) -> growkit.Recipe:
    """Save the source of a case, and write what is made of it."""
    kind, sizes, steps = CASES[name]
    source = save_model(folder / name / "source", kind, **sizes)
    content = {"source": str(source), "output": str(folder / name / "out"), "steps": steps}
    file = folder / name / "recipe.yaml"
    file.write_text(json.dumps({**content, "seed": 3, "verify": False, **more}))
    recipe = growkit.load_recipe(file)
    growkit.run(recipe)
    return recipe


# Models that are spread over processes.

PARALLEL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
}


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the matrices of all layers."""
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    plan = {n: PARALLEL[end]() for n in names if (end := n.rpartition(".")[2]) in PARALLEL}
    parallelize_module(model, mesh, plan)


def by_columns(parameter: nn.Parameter) -> Shard:
    """Shard the second dimension where there is one."""
    return Shard(1 if parameter.dim() > 1 else 0)


def data_parallel(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2, a layer at a time."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def on_rows(model: Any) -> None:
    data_parallel(model, init_device_mesh("cpu", (RANKS,)))


def on_columns(model: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    data_parallel(model, mesh, shard_placement_fn=by_columns)


def on_matrices(model: Any) -> None:
    tensor_parallel(model, init_device_mesh("cpu", (RANKS,)))


def on_both(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    data_parallel(model, mesh["dp"])


WAYS: dict[str, Callable[[Any], None]] = {
    "FSDP2, Shard(0)": on_rows,
    "FSDP2, Shard(1)": on_columns,
    "tensor parallel": on_matrices,
    "FSDP2 and tensor parallel": on_both,
}
CONFIGS = {
    "fsdp_size=4": {"fsdp_size": 4},
    "tp_size=4": {"tp_size": 4},
    "fsdp_size=2, tp_size=2": {"fsdp_size": 2, "tp_size": 2},
}


def spread(
    config: Any, spreading: Callable[[Any], None], dtype: torch.dtype, like: Any = None
) -> Any:
    """A model without weights, spread; what no file holds is as in another one, if it is given."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    spreading(model)
    model.to_empty(device="cpu")
    for name, buffer in like.named_buffers() if like is not None else ():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer.clone())  # also in its dtype
    return model


def whole(tensor: Any) -> Tensor:
    """Of all shards."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat, others = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return bool(flat.equal(others))


def differing(state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of what differs; collective, where tensors are spread."""
    found = {name: whole(tensor) for name, tensor in state.items()}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [name for name in found if not alike(found[name], expected[name])]


def spread_tensors(state: Mapping[str, Any]) -> int:
    """How many are."""
    each = [t for t in state.values() if isinstance(t, DTensor)]
    return sum(any(not p.is_replicate() for p in tensor.placements) for tensor in each)


def look(name: str, folder: Path, found: dict[str, Any], ways: Collection[str]) -> None:
    """Load a model in some ways, each over all processes."""
    recipe = growkit.load_recipe(folder / name / "recipe.yaml")
    out = Path(recipe.output)
    expected = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False).state_dict()
    config = AutoConfig.from_pretrained(out, trust_remote_code=False)
    dtype = next(iter(expected.values())).dtype
    reader = GrownStorageReader(recipe)
    for way, spreading in WAYS.items():
        if way not in ways:
            continue
        model = spread(config, spreading, dtype)
        state = model.state_dict()
        dcp.load(state, storage_reader=reader)
        found[f"{name}: {way}"] = spread_tensors(state), differing(state, expected)
    for way, sizes in CONFIGS.items():
        if way not in ways:
            continue
        if "tp" in way and not getattr(config, "base_model_tp_plan", None):
            continue  # growkit's own class has none
        model = growkit.load(recipe, distributed_config=DistributedConfig(**sizes))
        state = model.state_dict()
        found[f"{name}: {way}"] = spread_tensors(state), differing(state, expected)


# Optimizers.


def make_trained(folder: Path) -> None:
    """A source that has been trained in float64, grown with the state of its optimizer."""
    source = save_model(folder / "trained" / "source", "llama", **SIZES)
    model, optimizer = trained(source, 2)
    state = save_distributed(model, optimizer, folder / "trained" / "state")
    steps = [{"grow": "hypercloning", "hidden": "x2", "symmetry": "keep"}]
    content = {"source": str(source), "output": str(folder / "trained" / "out"), "steps": steps}
    file = folder / "trained" / "recipe.yaml"
    file.write_text(json.dumps({**content, "verify": False, "optimizer": str(state)}))
    growkit.run(file)


def look_at_optimizer(folder: Path, found: dict[str, Any], ways: Collection[str]) -> None:
    """Load the state on all processes and on one, and take a step on both."""
    reader = GrownStorageReader(folder / "trained" / "recipe.yaml")
    out = folder / "trained" / "out"
    alone = load_strict(out)
    optimizer = torch.optim.AdamW(reader.param_groups(alone))
    load_distributed(alone, optimizer, out)
    kept = get_optimizer_state_dict(alone, optimizer, options=FLAT)
    for way in ways:
        model = spread(alone.config, WAYS[way], torch.float64, alone)
        weights = model.state_dict()
        dcp.load(weights, storage_reader=reader)
        spread_optimizer = torch.optim.AdamW(reader.param_groups(model))
        state = get_optimizer_state_dict(model, spread_optimizer, options=FLAT)
        dcp.load({"optimizer": state}, storage_reader=reader)
        tensors, expected = (
            {name: value for name, value in each.items() if isinstance(value, Tensor)}
            for each in (state, kept)
        )
        wrong = differing(tensors, expected)
        wrong += [name for name in kept.keys() - expected.keys() if state[name] != kept[name]]
        found[f"optimizer: {way}"] = spread_tensors(tensors), wrong
        set_optimizer_state_dict(model, spread_optimizer, state, options=FLAT)
        step(model, spread_optimizer, 7)
        found[f"step: {way}"] = {name: whole(each) for name, each in model.state_dict().items()}
    step(alone, optimizer, 7)
    for way in ways:
        stepped = found.pop(f"step: {way}")
        pairs = [(stepped[name], each) for name, each in alone.state_dict().items()]
        furthest = max(float((one - other).abs().max()) for one, other in pairs)
        found[f"step: {way}"] = len(pairs), [furthest] if furthest > 1e-13 else []


# Controls: what is wrong is noticed.


def look_at_faults(folder: Path, name: str, found: dict[str, Any], faults: int) -> None:
    """Another seed, and a shard that begins one row too early."""
    recipe = growkit.load_recipe(folder / name / "recipe.yaml")
    config = AutoConfig.from_pretrained(recipe.output)
    expected = AutoModelForCausalLM.from_pretrained(recipe.output).state_dict()
    fill = Entry.fill

    def misplaced(entry: Entry, into: Tensor, where: Any) -> None:
        rows, *others = where
        if entry.name == "model.layers.1.mlp.up_proj.weight" and rows.start:
            where = [slice(rows.start - 1, rows.stop - 1), *others]
        fill(entry, into, where)

    every = [("offset", recipe.seed, misplaced), ("seed", 4, fill)]
    for fault, seed, patched in every[:faults]:
        model = spread(config, on_rows, torch.bfloat16)
        state = model.state_dict()
        with mock.patch.object(Entry, "fill", patched):
            dcp.load(state, storage_reader=GrownStorageReader(replace(recipe, seed=seed)))
        found[f"fault: {fault}"] = spread_tensors(state), differing(state, expected)


# Memory.


def make_large(folder: Path) -> None:
    """A model of 38 million parameters, to be grown to 151 million."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8}
    source = save_model(folder / "large" / "source", "llama", **sizes)
    steps = [{"grow": "hypercloning", "hidden": "x2", "ffn": "x2"}]
    content = {"source": str(source), "output": str(folder / "large" / "out"), "steps": steps}
    (folder / "large" / "recipe.yaml").write_text(json.dumps(content))


def measure(folder: Path) -> list[str]:
    """The peak of a process, beside what it had before, in the two ways of loading."""
    recipe, lines = folder / "large" / "recipe.yaml", []
    for way in ("torch.distributed.checkpoint", "transformers"):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        if way == "transformers":
            model = growkit.load(recipe, distributed_config=DistributedConfig(fsdp_size=RANKS))
        else:
            reader = GrownStorageReader(recipe)
            model = spread(parsed(reader.grown.config), on_rows, torch.float32)
            dcp.load(model.state_dict(), storage_reader=reader)
        own = sum(each.to_local().nbytes for each in model.parameters()) / 1e6
        lines.append(f"{way}: shard {own:.0f} MB, peak {memory('VmHWM') - before:.0f} MB")
        del model
    return lines


def memory(kind: str) -> float:
    """Of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{kind}:")[2].split()[0]) / 1e3


# Processes.


def rank_of(number: int, work: Callable[..., Any], folder: Path, results: Any, *more: Any) -> None:
    """One process of several."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
        results.put((number, work(folder, *more)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((number, traceback.format_exc()))
        raise


def on_all(work: Callable[..., Any], folder: Path, *more: Any) -> list[Any]:
    """Run something in all processes; gives what each returns."""
    forking = multiprocessing.get_context("fork")  # nothing is imported again
    results = forking.Queue()
    (folder / "store").unlink(missing_ok=True)
    processes = [
        forking.Process(target=rank_of, args=(number, work, folder, results, *more))
        for number in range(RANKS)
    ]
    for process in processes:
        process.start()
    found = {}
    for _ in processes:
        number, value = results.get(timeout=600)
        if isinstance(value, str):
            for process in processes:
                process.kill()
            raise AssertionError(f"process {number}: {value}")
        found[number] = value
    for process in processes:
        process.join()
    return [found[number] for number in range(RANKS)]


EVERYTHING = {name: [*WAYS, *CONFIGS] for name in CASES}
SAMPLE = {
    "hypercloning": ["FSDP2 and tensor parallel", "fsdp_size=2, tp_size=2"],
    "upcycling": ["FSDP2, Shard(1)"],
}


def look_at_all(folder: Path, ways: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Everything that is asked for, an optimizer, and the controls."""
    found: dict[str, Any] = {}
    for name in ways:
        look(name, folder, found, ways[name])
    rows, columns, *_ = WAYS
    look_at_optimizer(folder, found, [rows] if ways is SAMPLE else [rows, columns])
    look_at_faults(folder, "hypercloning", found, 1 if ways is SAMPLE else 2)
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.memory:
            make_large(folder)
            sys.stdout.writelines(f"{line}\n" for each in on_all(measure, folder) for line in each)
            return 0
        ways = SAMPLE if arguments.sample else EVERYTHING
        for name in ways:
            make(name, folder)
        make_trained(folder)
        every = on_all(look_at_all, folder, ways)
    failed = False
    for number, each in enumerate(every):
        for way, (count, wrong) in each.items():
            failed |= way.startswith("fault") != bool(wrong) or not count
            if not number:
                sys.stdout.write(f"{way}: {count} tensors spread, differing: {wrong or 'none'}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
