"""A small example of a family, for questions that need headers and no weights."""

from __future__ import annotations

from typing import Any

from growkit.base.tensors import Config
from growkit.families.family import Family
from growkit.families.headers import Headers

SIZES = {
    "vocab": 64,
    "hidden": 64,
    "ffn": 64,
    "layers": 2,
    "heads": 8,
    "signal_heads": 8,
    "noise_heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "experts": 4,
}
"""Of axes that most families have; others have the size that the class assumes, or this one."""

OTHER = 8


class Example(Headers):
    """A model that nobody has.

    Args:
        family: of the model.
        config: its ``config.json``.
    """

    def __init__(self, family: Family, config: Config) -> None:
        super().__init__(family, config, f"an example of {family.name}")

    def lacking(self, name: str) -> Exception:
        """Nobody is to ask."""
        return AssertionError(f"{name} of {self.where()} is asked for its numbers")


def example(family: Family, **switches: Any) -> Example:
    """A model whose config says nothing that it need not say, but for some switches.

    Where a family has experts, every layer has some, and a token goes through two of them.
    """
    config: dict[str, Any] = {"model_type": family.model_types[0]}
    if family.experts:
        config |= {**family.experts.config, family.experts.top_k: 2}
    config |= switches
    assert config["model_type"] in family.model_types
    known = {key: value for key, value in family.defaults.items() if not callable(value)}
    for key, entry in family.axes.items():
        assumed = key in family.defaults
        if key in family.derived or (callable(entry) and assumed):
            continue
        axes = entry(known | config) if callable(entry) else entry
        if axes and (not assumed or SIZES.keys() >= {*axes}):
            config[key] = sum(SIZES.get(axis, OTHER) for axis in axes)
    return Example(family, config)
