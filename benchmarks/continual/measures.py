"""What is measured beside the loss where a rate has decayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.continual.maps import attention
from benchmarks.continual.needles import retrieved


def needles(model: Any, text: Any, context: int, device: str) -> dict[str, float]:
    """Retrieval and attention (``needles.py``, ``maps.py``)."""
    model.eval()
    found = retrieved(model, text, context, device) | attention(model, text, context, device)
    model.train()
    return found


MEASURES: dict[str, Callable[[Any, Any, int, str], dict[str, float]]] = {"needles": needles}
