"""What figures are measured with, and files made with."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """What figures are measured with, and files made with."""
    packages = ("growkit", "torch", "transformers", "safetensors")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
