"""Caches of models that run one layer at a time: keys, values and recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def new_cache(model: Any) -> Any:
    """An empty cache that fits all layers."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def lengthen(cache: Any, layers: int, tokens: int) -> None:
    """Add tokens that hold nothing, so that a class finds its masks and positions.

    Args:
        cache: of ``new_cache``.
        layers: number of layers of the model.
        tokens: how many.
    """
    nothing = torch.zeros(1, 1, tokens, 1)
    for index in range(len(cache.layers) or layers):
        layer = cache.layers[index] if cache.layers else None
        recurrent = getattr(layer, "has_previous_state", None)
        if recurrent is not None:
            recurrent.update(dict.fromkeys(recurrent, True))
        # Layers that remember nothing have a place in the cache, too.
        if layer is None or (hasattr(layer, "update") and hasattr(layer, "lazy_initialization")):
            cache.update(nothing, nothing, index)


def keep_shapes(cache: Any, index: int) -> None:
    """Keep the shape of what a layer remembers alone: who reads it again will notice."""
    for layer in cache.layers[index : index + 1]:
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), Tensor):
                setattr(layer, name, _unknown(getattr(layer, name)))
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            states.update({at: _unknown(each) for at, each in states.items() if each is not None})


def _unknown(tensor: Tensor) -> Tensor:
    return tensor.new_full((), torch.nan).expand(tensor.shape)
