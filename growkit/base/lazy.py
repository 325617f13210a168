"""Lazy imports of numpy and torch, and packages that serve as registries of their modules.

``from growkit.base.lazy import Tensor, np, torch`` replaces imports inside functions, so that
commands without numpy and torch start at once. Each file of a registry package is one family or
method.
"""

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["NDArray", "Tensor", "members", "np", "torch"]

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:

    class _Module:
        """A module that is imported when one of its attributes is used."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(import_module(self._name), attribute)
            setattr(self, attribute, found)  # cached: __getattr__ is not called again
            return found

    np, torch = _Module("numpy"), _Module("torch")
    NDArray, Tensor = "numpy.typing.NDArray", "torch.Tensor"  # for annotations alone


def members(package: str, attribute: str) -> dict[str, object]:
    """``{module name: module.attribute}`` for every module of a package that has it, by name.

    A new module needs no registration elsewhere. Modules without the attribute hold shared code.
    """
    return dict(_members(package, attribute, tuple(import_module(package).__path__)))


@cache
def _members(package: str, attribute: str, path: tuple[str, ...]) -> dict[str, object]:
    modules = {
        info.name: import_module(f"{package}.{info.name}") for info in pkgutil.iter_modules(path)
    }
    return {
        name: getattr(module, attribute)
        for name, module in modules.items()
        if hasattr(module, attribute)
    }
