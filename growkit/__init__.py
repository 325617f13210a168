"""Grow trained language-model checkpoints, and prove that nothing they learned was lost."""

import sys

# ``python -m growkit`` puts the current folder first in the search path, so that a typing.py in an
# untrusted folder would run. Nothing else may be imported before this line; growkit's own files are
# found without that entry.
if getattr(sys, "argv", [""])[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    del sys.path[:1]

from functools import cache
from importlib import import_module

from growkit.base import __version__ as __version__


@cache
def _modules() -> dict[str, str]:
    """The module of every public name, as ``__init__.pyi`` imports them for type checkers."""
    import ast  # few imports above, so that Ctrl-C works early

    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        imports = [line for line in ast.parse(stub.read()).body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}


def __getattr__(name: str) -> object:
    # Imported on first use: ``growkit --help`` must not wait for torch.
    if name == "__all__":
        return __dir__()
    if (home := _modules().get(name)) is None:
        raise AttributeError(f"module 'growkit' has no attribute {name!r}")
    if home == "growkit":
        return import_module(f"growkit.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(_modules())
