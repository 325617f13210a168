"""What is measured beside the loss where a rate has decayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MEASURES: dict[str, Callable[..., dict[str, float]]] = {}


def mixed(batch: Tensor, text: Any, seed: int, first: int) -> Tensor:
    return batch
