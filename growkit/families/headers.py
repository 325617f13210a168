"""Models without weights: the headers that a config implies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.base.tensors import (
    ANYWHERE,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    Config,
    TensorInfo,
    Weights,
)
from growkit.families.family import Family

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE_SIZES = {
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
"""Sizes of an example, for axes that most families have."""

OTHER_SIZE = 8
"""Size of any other axis for which the class has no default."""


class Headers(Weights):
    """A model without numbers: every tensor that its family expects.

    Args:
        family: of the model.
        config: its ``config.json``.
        where: its name in messages.

    Raises:
        InputError: the config has a wrong size or dtype.
    """

    def __init__(self, family: Family, config: Config, where: str) -> None:
        self.config, self._where = config, where
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in TORCH_NAMES.values():
            expected = ", ".join(TORCH_NAMES.values())
            raise InputError(f"dtype in {where} is {dtype!r}; one of {expected} was expected")
        sizes, patterns = family.sizes(config), family.patterns(config)
        self.tensors = {
            name: TensorInfo(pattern.shape(sizes), SAFETENSORS_NAMES[dtype])
            for name, pattern in patterns.items()
        }

    def where(self, name: str | None = None) -> str:
        """The name of the model in messages."""
        return self._where

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Refuse: there are no numbers."""
        raise InputError(
            f"this recipe is planned with the numbers of {name}, but {self._where} has no weights; "
            "plan it where they are"
        )

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return ANYWHERE


def example(family: Family, **switches: Any) -> Headers:
    """A small example of a family: a minimal config with some switches.

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
        if axes and (not assumed or EXAMPLE_SIZES.keys() >= {*axes}):
            config[key] = sum(EXAMPLE_SIZES.get(axis, OTHER_SIZE) for axis in axes)
    return Headers(family, config, f"an example of {family.name}")
