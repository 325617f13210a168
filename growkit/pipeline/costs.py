"""The disk, memory and time of a run, from headers.

The disk is a firm upper limit. Memory and time are scaled, by numbers of parameters and tokens,
from measurements with Llamas of several sizes (``benchmarks/results``: growth speed, proof speed,
proof memory). For these models estimates are off by up to a half; machines differ by more.
"""

import re
import shutil
from pathlib import Path

from growkit.base import tensors
from growkit.base.settings import MAX_WHOLE_MODELS, Settings
from growkit.model.checkpoint.writing import WORKERS
from growkit.model.model import Model
from growkit.planning.plan import SMALL as SMALL_TENSOR
from growkit.results.growth_result import Estimate

RESERVED_BYTES = 1 << 20
"""Bytes reserved on the disk for files without weights."""

BYTES_PER_ENTRY = 2560
"""Bytes reserved for every tensor's entries in headers, archives, indices and the manifest."""

MEMORY_OF_TORCH = 0.27e9
"""Bytes of memory that Python and torch take."""

MEMORY_OF_PROOF = 1.2e9
"""Bytes of memory of Python, torch, transformers and the activations of both models."""

SECONDS_TO_IMPORT = 2.0
"""Seconds to import torch, and the same again for transformers."""

BYTES_WRITTEN_PER_SECOND = 6e8
"""Bytes computed and written per second (``benchmarks/cost_model.py``)."""

SECONDS_PER_PARAMETER = 2.5e-8
"""Seconds of a proof for each parameter, regardless of tokens."""

SECONDS_PER_PARAMETER_AND_TOKEN = 2.6e-11
"""Seconds of a proof for each parameter and token."""


def estimate(
    headers: tuple[Model, Model],
    output: Path,
    proof: Settings | None,
    extra: int,
    *,
    exact: bool,
    bandwidth: int | None = None,
) -> Estimate:
    """Estimate the costs of writing and proving a target.

    Args:
        headers: headers of the source and of the target.
        output: the output folder.
        proof: settings of the proof; None for no proof.
        extra: bytes of other files, see ``disk_needed``.
        exact: whether every weight is to be recovered, so that fewer tokens are compared.
        bandwidth: bytes per second of reading and writing; None for no limit.
    """
    source, target = headers
    place = next(parent for parent in output.parents if parent.exists())
    read, written = (tensors.total_bytes(model.tensors) for model in headers)
    moving = (read + written) / bandwidth if bandwidth else 0.0
    proving = None
    if proof is not None:
        parameters = sum(tensors.total_parameters(model.tensors) for model in headers)
        prompts, length = (proof.if_weights_recovered if exact else proof).amount
        per_parameter = SECONDS_PER_PARAMETER + SECONDS_PER_PARAMETER_AND_TOKEN * prompts * length
        proving = round(SECONDS_TO_IMPORT + parameters * per_parameter, 1)
    writing = SECONDS_TO_IMPORT + max(written / BYTES_WRITTEN_PER_SECOND, moving)
    return Estimate(
        disk_needed=disk_needed(target, extra),
        disk_free=shutil.disk_usage(place).free,
        memory=_memory(source, target, proof),
        write_seconds=round(writing, 1),
        proof_seconds=proving,
        basis="memory and time are scaled from runs on 2 CPU cores with a fast disk",
    )


def disk_needed(target: Model, extra: int) -> int:
    """Upper limit of an output's size in bytes.

    Args:
        target: headers of the target.
        extra: bytes of tokenizer files, an optimizer's state and the like.
    """
    entries = BYTES_PER_ENTRY * len(target.tensors)
    return tensors.total_bytes(target.tensors) + entries + extra + RESERVED_BYTES


def _memory(source: Model, target: Model, proof: Settings | None) -> int:
    """Estimate the memory of a process that writes and proves a target, in bytes."""
    largest = max((info.bytes for info in source.tensors.values()), default=0)
    in_parts = all(target.cuts(name) for name in target.tensors)
    memory = MEMORY_OF_TORCH + WORKERS * (min(largest, SMALL_TENSOR) if in_parts else largest)
    if proof is not None:
        in_float64 = 8 * sum(tensors.total_parameters(model.tensors) for model in (source, target))
        at_once = in_float64 if in_float64 <= MAX_WHOLE_MODELS else 0
        memory = max(memory, MEMORY_OF_PROOF + max(_largest_layer(target), at_once))
    return round(memory)


def _largest_layer(target: Model) -> int:
    """Bytes that a proof holds: a layer in float64, or a tensor outside the layers as stored."""
    held: dict[str, int] = {}
    for name, info in target.tensors.items():
        layer = re.match(r".*?\.\d+\.", name)
        part, size = (layer[0], 8 * info.elements) if layer else (name, info.bytes)
        held[part] = held.get(part, 0) + size
    return max(held.values(), default=0)
