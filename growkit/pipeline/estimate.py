"""Estimate what a run takes: the disk for certain, memory and time from measurements.

Memory and times of Llamas of several sizes (``benchmarks/results``: growth speed, proof speed,
proof memory) are scaled by the number of parameters and of tokens. For these models that is off by
up to a half; machines differ by more.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from growkit.base.settings import Settings
from growkit.base.tensors import TensorInfo, Weights, total_bytes, total_parameters
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.writing import WORKERS, parse_bytes, shards_of
from growkit.engine.user_family import temporary_family
from growkit.planning.plan import SMALL as SMALL_TENSOR
from growkit.recipe.planner import describe, plan_recipe
from growkit.recipe.recipe import Recipe, load_recipe, recipe_file
from growkit.results.operation import Estimate, LargePlan
from growkit.sources import find

ROOM = 1 << 20
"""Bytes reserved on the disk for files without weights."""

ENTRY = 2560
"""Bytes reserved for every tensor's entries in headers, archives, indices and the manifest."""

BASIS = "memory and time are scaled from runs on 2 CPU cores with a fast disk"

LOADED = 0.27e9
"""Bytes of memory that Python and torch take."""

PROVING = 1.2e9
"""The same with transformers, and the activations of both models."""

STARTED = 2.0
"""Seconds to import torch, and again transformers."""

WRITTEN_PER_SECOND = 6e8
"""Bytes made and written in a second (``benchmarks/cost_model.py``)."""

LOOKED_AT = 2.5e-8
"""Seconds of a proof for each parameter, regardless of tokens."""

MULTIPLIED = 2.6e-11
"""Seconds of a proof for each parameter and token."""

SMALL = 1 << 29
"""Bytes in float64 up to which both models are also used whole."""


def plan(recipe: Recipe | str | Path, *, bandwidth: str | None = None) -> LargePlan:
    """Estimate the files, disk, memory and time of a recipe. Nothing is written.

    Args:
        recipe: as in ``growkit.run``. Of its source only headers are read, and where it has no
            weights, only its ``config.json``; of a model on the Hub no weights are fetched.
        bandwidth: bytes per second that can be read and written, e.g. ``2GB``; None where only
            computing limits the speed.

    Raises:
        InputError: the recipe cannot be carried out, or needs weights to be planned.
    """
    limit = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe_file(Path(recipe)))
    with temporary_family(recipe.family):
        found = find(recipe.source, weights=False)
        source, extra = found.headers(), Folder(found.folder).carried_bytes()
        recipe = replace(recipe, source=found.name)
        prepared = plan_recipe(recipe, source)
        described = describe(recipe, source, prepared)
    target, exact = prepared.lineage.target, described.promise == "exact"
    shards = shards_of(target.tensors, parse_bytes(recipe.shard_size))
    files = [total_bytes(shard.tensors) for shard in shards]
    sizes = (source, target), recipe.output_path, recipe.verify, extra
    if recipe.optimizer is not None:
        described.warnings.append(
            f"the disk does not count what the optimizer's state, {recipe.optimizer}, becomes; "
            "growkit run --dry-run reads it, and does"
        )
    return LargePlan(
        **described | estimate(*sizes, exact=exact, bandwidth=limit),
        bandwidth=limit,
        read=total_bytes(source.tensors),
        files=len(files),
        largest_file=max(files),
    )


def estimate(
    headers: tuple[Weights, Weights],
    output: Path,
    proof: Settings | None,
    extra: int,
    *,
    exact: bool,
    bandwidth: int | None = None,
) -> Estimate:
    """Estimate what it takes to write a target, and to prove it.

    Args:
        headers: of the source and of the target.
        output: the folder to be made.
        proof: what is compared; None for no proof.
        extra: bytes of other files, see ``disk_needed``.
        exact: whether every weight is to be recovered, so that fewer tokens are compared.
        bandwidth: bytes that can be read and written in a second; None for no limit.
    """
    source, target = headers
    place = next(parent for parent in output.parents if parent.exists())
    read, written = (total_bytes(each.tensors) for each in headers)
    moving = (read + written) / bandwidth if bandwidth else 0.0
    proving = None
    if proof is not None:
        parameters = sum(total_parameters(each.tensors) for each in headers)
        prompts, length = (proof.settled if exact else proof).amount
        proving = round(STARTED + parameters * (LOOKED_AT + MULTIPLIED * prompts * length), 1)
    return Estimate(
        disk_needed=disk_needed(target, extra),
        disk_free=shutil.disk_usage(place).free,
        memory=_memory(source, target, proof),
        write_seconds=round(STARTED + max(written / WRITTEN_PER_SECOND, moving), 1),
        proof_seconds=proving,
        basis=BASIS,
    )


def disk_needed(target: Weights, extra: int) -> int:
    """Bytes that an output takes, at most.

    Args:
        target: headers of the target.
        extra: bytes of tokenizer files, an optimizer's state and the like.
    """
    return total_bytes(target.tensors) + ENTRY * len(target.tensors) + extra + ROOM


def _memory(source: Weights, target: Weights, proof: Settings | None) -> int:
    """Approximate bytes of memory of a process that writes and proves a target."""
    largest = max((info.bytes for info in source.tensors.values()), default=0)
    in_parts = all(target.cuts(name) for name in target.tensors)
    memory = LOADED + WORKERS * (min(largest, SMALL_TENSOR) if in_parts else largest)
    if proof is not None:
        whole = 8 * (total_parameters(source.tensors) + total_parameters(target.tensors))
        at_once = whole if whole <= SMALL else 0
        memory = max(memory, PROVING + max(_largest_layer(target.tensors), at_once))
    return round(memory)


def _largest_layer(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes that a proof holds: a layer in float64, or a tensor outside of layers as it is."""
    layers: dict[str, int] = {}
    outside = 0
    for name, info in tensors.items():
        layer = re.match(r".*?\.\d+\.", name)
        if layer:
            layers[layer[0]] = layers.get(layer[0], 0) + 8 * info.elements
        else:
            outside = max(outside, info.bytes)
    return max([outside, *layers.values()])
