"""What a run will take: the disk for certain, memory and time by what was measured.

Memory and times of Llamas of several sizes (``benchmarks/results``: growth speed, proof speed,
proof memory) are scaled by the number of parameters and of tokens. For these models that is off by
up to a half; machines differ by more.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from growkit.base.settings import Settings
from growkit.checkpoint.tensors import TensorInfo, Weights, total_bytes, total_parameters
from growkit.checkpoint.writing import WORKERS
from growkit.planning.plan import SMALL as SMALL_TENSOR
from growkit.results.operation import Estimate

ROOM = 1 << 20
"""Bytes set aside on the disk for what growkit writes beside weights, whatever the model."""

ENTRY = 2560
"""Bytes set aside for what is said of a tensor: in headers, archives, indices, the manifest."""

BASIS = "memory and time are scaled from runs on 2 CPU cores with a fast disk"

LOADED = 0.27e9
"""Bytes of memory that Python and torch take."""

PROVING = 1.2e9
"""The same with transformers, and with what both models make of the tokens."""

STARTED = 2.0
"""Seconds until torch is there, and again transformers."""

WRITTEN = 6e8
"""Bytes that are made and written in a second (``benchmarks/cost_model.py``)."""

LOOKED_AT = 2.5e-8
"""Seconds that a proof takes for a parameter, however many tokens there are."""

MULTIPLIED = 2.6e-11
"""Seconds that it takes for a parameter and a token."""

SMALL = 1 << 29
"""Bytes in float64 up to which both models are also used whole."""


def estimate(
    source: Weights,
    target: Weights,
    output: Path,
    proof: Settings | None,
    beside: int,
    *,
    exact: bool,
) -> Estimate:
    """What it will take to write a target, and to prove it.

    Args:
        source: headers of the source.
        target: headers of the target.
        output: the folder to be made.
        proof: what is compared; None for no proof.
        beside: bytes of what goes along with the weights.
        exact: whether fewer tokens do, since every weight is to give the source's back.
    """
    place = next(parent for parent in output.parents if parent.exists())
    written = total_bytes(target.tensors)
    return Estimate(
        disk_needed=disk_needed(target, beside),
        disk_free=shutil.disk_usage(place).free,
        memory=memory_needed(source, target, proof),
        write_seconds=round(seconds_to_write(written), 1),
        proof_seconds=proof_seconds(source, target, proof, exact=exact),
        basis=BASIS,
    )


def disk_needed(target: Weights, beside: int) -> int:
    """Bytes that an output takes, at most.

    Args:
        target: headers of the target.
        beside: bytes of what goes along with the weights: tokenizer files, an optimizer's state.
    """
    return total_bytes(target.tensors) + ENTRY * len(target.tensors) + beside + ROOM


def memory_needed(source: Weights, target: Weights, proof: Settings | None) -> int:
    """Bytes of memory, about, that a process takes which writes and proves a target.

    Args:
        source: headers of the source.
        target: headers of the target.
        proof: what is compared; None for no proof.
    """
    largest = max((info.bytes for info in source.tensors.values()), default=0)
    in_parts = all(target.cuts(name) for name in target.tensors)
    memory = LOADED + WORKERS * (min(largest, SMALL_TENSOR) if in_parts else largest)
    if proof is not None:
        parameters = total_parameters(source.tensors) + total_parameters(target.tensors)
        whole = 8 * parameters if 8 * parameters <= SMALL else 0
        memory = max(memory, PROVING + max(_at_a_time(target.tensors), whole))
    return round(memory)


def seconds_to_write(written: int, moved: int = 0, bandwidth: int | None = None) -> float:
    """How long writing takes.

    Args:
        written: bytes that the process writes which writes most.
        moved: bytes that all processes read and write.
        bandwidth: bytes per second in which these go; None for no limit.
    """
    return STARTED + max(written / WRITTEN, moved / bandwidth if bandwidth else 0.0)


def proof_seconds(
    source: Weights, target: Weights, proof: Settings | None, *, exact: bool
) -> float | None:
    """How long a proof takes, by one process; None for no proof. See ``estimate``."""
    if proof is None:
        return None
    parameters = total_parameters(source.tensors) + total_parameters(target.tensors)
    prompts, length = (proof.settled if exact else proof).amount
    return round(STARTED + parameters * (LOOKED_AT + MULTIPLIED * prompts * length), 1)


def _at_a_time(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes that a proof holds: a layer in float64, or what stands outside of layers, as it is."""
    layers: dict[str, int] = {}
    outside = 0
    for name, info in tensors.items():
        layer = re.match(r".*?\.\d+\.", name)
        if layer:
            layers[layer[0]] = layers.get(layer[0], 0) + 8 * info.elements
        else:
            outside = max(outside, info.bytes)
    return max([outside, *layers.values()])
