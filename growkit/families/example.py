"""A small model of a family as headers alone, for questions that need no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from growkit.checkpoint.tensors import Config, TensorInfo
from growkit.families.family import Family

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class Example:
    """A model that nobody has: a config, and the headers that its family expects.

    Attributes:
        family: of the model.
        config: its ``config.json``.
    """

    family: Family
    config: Config

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``growkit.checkpoint.tensors.Weights``."""
        sizes = self.family.sizes(self.config)
        patterns = self.family.patterns(self.config)
        return {name: TensorInfo(each.shape(sizes), "F32") for name, each in patterns.items()}

    def where(self, name: str | None = None) -> str:
        """What messages call it."""
        return f"an example of {self.family.name}"

    def blocks(self, name: str) -> Iterator[Tensor]:
        """There are no numbers."""
        self._no_numbers(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """There are no numbers."""
        self._no_numbers(name)

    def by_rows(self, name: str) -> bool:
        """There are no numbers."""
        return True

    def _no_numbers(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} of {self.where()} is asked for its numbers")


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
