"""Models are built without the random numbers that other weights take the place of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn


@contextmanager
def uninitialised(device: str | None = None) -> Iterator[None]:
    """Modules made here have buffers as ever, but parameters with no numbers in them yet.

    A parameter counts as one whose weights were read, which transformers leaves as it is, by
    whichever function a class initialises it. Buffers that no file holds (the frequencies of rotary
    embeddings, say) are computed: they do not count so.

    Args:
        device: where parameters are put; None for where they are made.
    """
    from transformers.initialization import guard_torch_init_functions

    register = nn.Module.register_parameter

    def register_as_read(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            if device is not None:
                parameter = nn.Parameter(parameter.to(device))
            as_read: Any = parameter
            as_read._is_hf_initialized = True
        register(module, name, parameter)

    with (
        guard_torch_init_functions(),
        patch.object(nn.Module, "register_parameter", register_as_read),
    ):
        yield
