"""One file, one family or method: the packages are their own registries."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module


def members(package: str, attribute: str) -> dict[str, object]:
    """``{module name: module.attribute}`` for every module of a package that has it, by name.

    A new module in the package is found by being there; nothing else needs to name it. Modules
    without the attribute are shared by the rest.
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
