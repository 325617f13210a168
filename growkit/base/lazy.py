"""numpy and torch, imported when they are first used: commands that need neither start at once.

``from growkit.base.lazy import Tensor, np, torch`` takes the place of imports in functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "np", "torch"]

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:

    class _Module:
        """Stands for a module until one of its attributes is needed."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(import_module(self._name), attribute)
            setattr(self, attribute, found)  # the next time, this is not called
            return found

    np, torch = _Module("numpy"), _Module("torch")
    Tensor = "torch.Tensor"  # for annotations alone
