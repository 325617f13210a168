"""The outline of a planned checkpoint: a folder with its headers, and no numbers behind them.

Transformers can be asked what it would make of a model that is nowhere written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from growkit.checkpoint.made import write_json
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import temporary
from growkit.checkpoint.tensors import Config, Weights, total_bytes
from growkit.checkpoint.writing import header_of


@contextmanager
def outlined(weights: Weights, config: Config) -> Iterator[Checkpoint]:
    """A temporary folder that takes no room, whatever the size of the model.

    Args:
        weights: whose tensors it seems to hold; their numbers are not to be read.
        config: what ``config.json`` says.

    Raises:
        InputError: the folder cannot be made.
    """
    with temporary("outline") as folder:
        write_json(folder / "config.json", config)
        begin = header_of(weights.tensors)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(begin)
            file.truncate(len(begin) + total_bytes(weights.tensors))
        yield Checkpoint(folder)
