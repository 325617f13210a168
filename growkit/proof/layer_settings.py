"""Whether layers that are alike in the source are alike in the target.

A prompt that is shorter than a window does not show which layers have one. What a class makes of
its config for every layer is in the attributes of its modules, so these are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from growkit.engine.layerwise import Layerwise

NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes that say which layer it is, or how it is used."""

Settings = Mapping[str, Any]


def changed_layer_setting(
    source: Layerwise, target: Layerwise, layers: Sequence[int | None] | None
) -> str | None:
    """The first setting of a layer that differs from those of layers that were like it.

    Sizes may be others, if they are so wherever they were the same.

    Args:
        source: a model.
        target: another one.
        layers: which layers of the source those of the target compute; None for the same ones.

    Returns:
        Its name in the target; None where there is none, or nobody knows which layers to compare.
    """
    before, after = (_layers(model) for model in (source, target))
    if layers is None and len(before) == len(after):
        layers = range(len(after))
    if layers is None or len(layers) != len(after):
        return None
    became: dict[tuple[str, Any], Any] = {}
    for (name, found), number in zip(after, layers, strict=True):
        if number is None or number >= len(before):
            continue
        given = before[number][1]
        for key in sorted(given.keys() & found.keys()):
            if became.setdefault((key, given[key]), found[key]) != found[key]:
                return f"{name}.{key}"
    return None


def _layers(model: Layerwise) -> list[tuple[str, Settings]]:
    """Name and settings of every layer."""
    modules = dict(model.model.named_modules())
    return [(name, _settings(modules[name])) for name in model.names[1:-1] if name in modules]


def _settings(layer: Any) -> Settings:
    """Every plain attribute of the modules of a layer, by its path in it."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, module in layer.named_modules()
        for key, value in vars(module).items()
        if key not in NUMBERS and isinstance(value, bool | int | float | str | None)
    }
