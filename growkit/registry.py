"""One file, one family or method: the packages are their own registries."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def members(package: ModuleType, attribute: str) -> dict[str, object]:
    """``{module name: module.attribute}`` for every module of a package, in alphabetical order.

    A new module in the package is found by being there; nothing else needs to name it.
    """
    return {
        info.name: getattr(import_module(f"{package.__name__}.{info.name}"), attribute)
        for info in pkgutil.iter_modules(package.__path__)
    }
