"""Lazy imports of numpy and torch, and packages that serve as registries of their modules.

``from growkit.base.lazy import Tensor, np, torch`` replaces imports inside functions, so that
commands without numpy and torch start at once. Each file of a registry package is one family or
method.
"""

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["NDArray", "Tensor", "members", "np", "of_extras", "registered", "torch", "usual_torch"]

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
            value = getattr(import_module(self._name), attribute)
            setattr(self, attribute, value)  # cached: __getattr__ is not called again
            return value

    np, torch = _Module("numpy"), _Module("torch")
    NDArray, Tensor = "numpy.typing.NDArray", "torch.Tensor"  # for annotations alone


@contextmanager
def usual_torch() -> Iterator[None]:
    """Undo what the caller chose for tensors: another device, inference mode, autocast."""
    with ExitStack() as undone:
        if "torch" in sys.modules:  # else nobody has chosen
            if torch.get_default_device().type != "cpu":
                undone.enter_context(torch.device("cpu"))
            if torch.is_inference_mode_enabled():
                undone.enter_context(torch.inference_mode(mode=False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    undone.enter_context(torch.autocast(device, enabled=False))
        yield


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


def registered(kind: str, attribute: str, *packages: str) -> dict[str, Any]:
    """``{module name: module.attribute}`` of packages, and of those of a kind in the extras.

    Args:
        kind: name of the packages in the extras, as ``checks`` in ``growkit.extras.adapters``.
        attribute: see ``members``.
        *packages: packages of the core.
    """
    every = (*packages, *of_extras(kind))
    return {name: member for one in every for name, member in members(one, attribute).items()}


@cache
def of_extras(name: str) -> tuple[str, ...]:
    """The modules and packages of a name in the extras, as ``growkit.extras.adapters.checks``."""
    folder = Path(__file__).parents[1] / "extras"
    files = [*folder.glob(f"*/{name}.py"), *folder.glob(f"*/{name}/__init__.py")]
    extras = sorted(file.relative_to(folder).parts[0] for file in files)
    return tuple(f"growkit.extras.{extra}.{name}" for extra in extras)
