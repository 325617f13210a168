"""Which layers of a source the layers of a deeper model copy, read off the bits of one matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence

from growkit.checkpoint.reading import Checkpoint

IN_LAYER = re.compile(r"(?P<stack>[^\d]+\.)(?P<layer>\d+)(?P<rest>\..+)")

Copied = Sequence[frozenset[int]]
"""For each layer of a target, the layers of the source that have the same matrix."""


def copied_layers(source: Checkpoint, target: Checkpoint) -> Copied | None:
    """The layers of the source that each layer of the target copies; none for a new layer.

    Args:
        source: a folder.
        target: a folder with another number of layers.

    Returns:
        None where some layers of the target are of another shape, or no layer is a copy.
    """
    before, after = (_smallest_matrices(each) for each in (source, target))
    shapes = {source.tensors[name].shape for name in before.values()}
    if not after or any(target.tensors[name].shape not in shapes for name in after.values()):
        return None
    matrices = {layer: source.read(name) for layer, name in before.items()}
    found = []
    for name in (after[layer] for layer in sorted(after)):
        matrix = target.read(name)
        found.append(frozenset(i for i, other in matrices.items() if matrix.equal(other)))
    return found if any(found) else None


def follows(was: Sequence[object], now: Sequence[object], copied: Copied | None) -> bool:
    """Whether a list with an entry for each layer is right for a model with other layers.

    Args:
        was: the source's entries.
        now: the target's.
        copied: see ``copied_layers``; without, the source's entries must be there in their order.
    """
    if copied is not None and len(copied) == len(now):
        pairs = zip(now, copied, strict=True)
        return all(not layers or any(was[i] == entry for i in layers) for entry, layers in pairs)
    rest = iter(now)
    return all(entry in rest for entry in was)


def _smallest_matrices(checkpoint: Checkpoint) -> dict[int, str]:
    """The matrix with the fewest elements of each layer; of equal ones the first by name."""
    found: dict[int, tuple[int, str]] = {}
    for name, info in checkpoint.tensors.items():
        inside = IN_LAYER.fullmatch(name)
        if inside and len(info.shape) == 2:
            layer = int(inside["layer"])
            found[layer] = min(found.get(layer, (info.bytes, name)), (info.bytes, name))
    return {layer: name for layer, (_, name) in found.items()}
