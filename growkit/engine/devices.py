"""Where arithmetic runs."""

from __future__ import annotations

import torch

from growkit.base.errors import InputError
from growkit.base.settings import NO_GPU


def chosen(name: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one.

    Raises:
        InputError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(NO_GPU)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def called(device: torch.device) -> str:
    """The name of a device, as it is reported."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
