"""Growing while a model loads: every process makes its own part, and nothing is written."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growkit.distributed.reader import GrownStorageReader as GrownStorageReader

__all__ = ["GrownStorageReader"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: torch.distributed takes a while.
    if name in __all__:
        return getattr(import_module("growkit.distributed.reader"), name)
    raise AttributeError(f"module 'growkit.distributed' has no attribute {name!r}")
