"""Make a small random model of a class: its sizes, weights and logits."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from growkit.base.tensors import Config
from growkit.engine.transformers_class import quiet
from growkit.model.families.config_keys import EXPERTS, HEADS, PLACES, last_part
from growkit.model.families.family_parts import leaves

SMALL = {
    "vocab": 61,
    "hidden": 40,
    "ffn": 22,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "positions": 64,
}
"""Sizes of the small models; all their products differ."""

NARROWEST = 4
"""Size below which a large model's sizes are not divided any further."""

LEAST_LISTED = 100
"""Size below which sizes in lists are not divided, since they may be constants."""

FEW = {EXPERTS: 16, re.compile(r"chunk_size$"): 16}
"""Names of keys, and their largest values in small models."""

ALONE = ("vocab", "ffn", "positions")
"""Axes that no other size depends on."""


def smaller(
    named: Mapping[str, str],
    numbers: Sequence[tuple[str, int]],
    lists: Mapping[str, Sequence[Any]],
    resolved: Config,
) -> Iterator[dict[str, Any]]:
    """Smaller and smaller sizes of a large model.

    Args:
        named: keys of its config by axis.
        numbers: keys that may be sizes, and their values.
        lists: keys with one entry per layer, and their values.
        resolved: the config as the class resolves it.
    """
    small = {key: SMALL[axis] for axis, key in named.items() if axis in SMALL}
    ends = {key: 1 for key, _ in leaves(resolved) if key.endswith("_token_id")}
    few = {
        key: min(value, limit)
        for key, value in numbers
        for name, limit in FEW.items()
        if name.search(last_part(key))
    }
    counts = [(k, v) for k, v in numbers if v > NARROWEST and not PLACES.search(k)]
    kept = {key: value for key, value in counts if HEADS.search(key)}
    kept |= {named[axis]: SMALL[axis] for axis in ALONE if axis in named}
    widths = {
        key: values
        for key, values in lists.items()
        if all(type(value) is int and value > LEAST_LISTED for value in values)
    }
    for fixed, power in product((ends | few, ends), range(8)):
        divided: dict[str, Any] = {key: max(NARROWEST, value >> power) for key, value in counts} | {
            key: [max(LEAST_LISTED, value >> power) for value in values]
            for key, values in widths.items()
        }
        # Some classes need heads times their size to equal hidden.
        for chosen in (divided | small, divided, divided | kept):
            yield chosen | fixed


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model, and other tensors that its class saves."""
    stored = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def random_weights(model: nn.Module) -> nn.Module:
    """Fill a model with random weights, each of a size that shows.

    Buffers vary about their own values: a factor of the residual stream far from 1 in each layer
    would enlarge rounding until it looks like a fault.
    """
    generator = torch.Generator().manual_seed(0)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in stored_tensors(model).items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name.lower() and tensor.dim() < 2:
                tensor.copy_(1 + 0.3 * noise)
            elif tensor.dim() < 2 and name in buffers:
                tensor.add_(0.3 * noise)
            elif tensor.dim() < 2:
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    return model


def sample_logits(model: Any, cache: bool = False) -> torch.Tensor:
    """Run some tokens through a model.

    Args:
        model: the model.
        cache: whether to fill a cache for later tokens.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(12)[None] * 5 % vocab
    with torch.no_grad(), quiet():
        logits = model(input_ids=ids, use_cache=cache).logits
    assert isinstance(logits, torch.Tensor)
    return logits
