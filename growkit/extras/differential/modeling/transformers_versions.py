"""Names that differ between the versions of transformers that run this model."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.modeling_outputs import BaseModelOutputWithPast


def _first(*places: str) -> Any:
    """The first module, or name in a module, that this transformers has; None if it has none."""
    for place in places:
        with suppress(ImportError):
            return import_module(place)
        module, _, name = place.rpartition(".")
        with suppress(ImportError, AttributeError):
            return getattr(import_module(module), name)
    return None


init = _first("transformers.initialization", "torch.nn.init")
is_tracing = _first(
    "transformers.utils.import_utils.is_tracing",
    "transformers.utils.import_utils.is_torchdynamo_compiling",
)
capture_outputs = _first("transformers.utils.output_capturing.capture_outputs")
if capture_outputs is None:
    capture_outputs = _first("transformers.utils.generic.check_model_inputs")()

CACHE = "cache"
"""The name of the cache in outputs and arguments."""

if all(field.name != CACHE for field in fields(BaseModelOutputWithPast)):
    CACHE = "past_key_values"

MASK_ARGUMENTS = signature(masking_utils.create_causal_mask).parameters.keys()
SIZES_BY_POSITIONS = "cache_position" in signature(DynamicLayer.get_mask_sizes).parameters
SHAPES_OF_STATIC = len(signature(StaticLayer.lazy_initialization).parameters) - 1
UPDATES_AT_POSITIONS = "cache_kwargs" in signature(DynamicLayer.update).parameters


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take its ``cache`` as ``past_key_values``, too, and no ``cache_position``."""

    @wraps(forward)
    def renamed(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("cache_position", None)
        if past_key_values is not None:
            kwargs["cache"] = past_key_values
        return forward(*args, **kwargs)

    return renamed


def columns_of(cache: Cache, rows: int, device: torch.device) -> Any:
    """The number of cached and new tokens, or the size of a static cache."""
    asked: Any = rows
    if SIZES_BY_POSITIONS:
        asked = torch.arange(rows, device=device) + cache.get_seq_length()
    return cache.get_mask_sizes(asked, 0)[0]


def update(cache: Cache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Add the keys and values of new tokens to a layer of a cache; return all of them."""
    where: tuple[Any, ...] = ()
    if UPDATES_AT_POSITIONS:
        rows = torch.arange(key.shape[2], device=key.device)
        where = ({"cache_position": rows + cache.get_seq_length(layer)},)
    cached: tuple[Tensor, Tensor] = cache.update(key, value, layer, *where)
    return cached


def causal_mask(config: Any, hidden_states: Tensor, cache: Any, **kwargs: Any) -> Any:
    """See ``create_causal_mask`` of transformers."""
    embeds = "inputs_embeds" if "inputs_embeds" in MASK_ARGUMENTS else "input_embeds"
    kwargs |= {
        embeds: hidden_states,
        ("cache" if "cache" in MASK_ARGUMENTS else "past_key_values"): cache,
    }
    if "cache_position" in MASK_ARGUMENTS:
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        kwargs["cache_position"] = rows + past
    return masking_utils.create_causal_mask(config=config, **kwargs)
