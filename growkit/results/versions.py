"""What figures are measured with, and files made with."""

from __future__ import annotations

import platform
from importlib.metadata import version

from growkit.version import __version__


def versions() -> dict[str, str]:
    """What figures are measured with, and files made with."""
    packages = ("torch", "transformers", "safetensors")
    own = {"python": platform.python_version(), "growkit": __version__}
    return own | {name: version(name) for name in packages}
