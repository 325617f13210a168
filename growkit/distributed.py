"""Growing while a model loads: every process computes its own part, and nothing is written."""

from growkit.extras.loading.grown_target import load
from growkit.extras.loading.storage_reader import GrownStorageReader

__all__ = ["GrownStorageReader", "load"]
