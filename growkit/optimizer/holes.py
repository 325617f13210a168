"""Files of torch with room for tensors, which is filled later, one block after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.checkpoint.folder import Folder
from growkit.checkpoint.torch_file import Kind, open_saved

if TYPE_CHECKING:
    from torch import Tensor

MOST_PICKLE = 1 << 25
"""Bytes of what a state holds beside numbers; fifty thousand parameters take as many."""


def save(
    content: Any, file: Path, tensors: Callable[[Any], dict[str, Tensor]], kind: Kind
) -> dict[str, tuple[Path, int]]:
    """Save what has room for tensors, but no numbers.

    Args:
        content: as it will be loaded.
        file: to be written.
        tensors: takes the content and gives its tensors by name.
        kind: what the file holds.

    Returns:
        The file and the offset in it where every tensor belongs.
    """
    import torch
    from torch.serialization import skip_data

    with skip_data(materialize_fake_tensors=True):
        torch.save(content, file)
    _, saved = open_saved(Folder(file.parent), file.name, tensors, kind, MOST_PICKLE)
    return {name: (file, place.begin) for name, place in saved.places.items()}
