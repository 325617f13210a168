"""Model families: tensor names and axes as data, one file each.

A family's file defines ``FAMILY``; being in this package is what registers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from growkit.algebra.axes import Layout
from growkit.checkpoint import Config
from growkit.errors import InputError
from growkit.registry import members


def always(config: Config) -> bool:
    """Every model of the family has the tensor."""
    return True


@dataclass(frozen=True)
class Tensor:
    """One tensor of a family, or one per layer if its name holds ``{layer}``.

    Attributes:
        name: as in the checkpoint, e.g. ``model.layers.{layer}.mlp.up_proj.weight``.
        layout: what it reads and writes, in the notation of ``growkit.algebra.axes``.
        when: whether a model of this (completed) config has the tensor.
    """

    name: str
    layout: str
    when: Callable[[Config], bool] = always


@dataclass(frozen=True)
class Multiple:
    """A demand of the family's model class: one config number is a multiple of another."""

    key: str
    of: str
    why: str


@dataclass(frozen=True)
class Family:
    """Everything that growkit knows of a model family.

    Attributes:
        name: for messages and ``growkit inspect``.
        model_types: the ``model_type`` values of ``config.json`` that belong to it.
        axes: for every config key that is a size, the axes whose sizes add up to it. An axis that
            stands twice counts twice; axes that share a key have equal sizes.
        defaults: what the model class assumes for keys that the config leaves out, as values or as
            functions of the config.
        tensors: every tensor.
        constants: axes whose size is the same in every model of the family.
        grouped: axes whose neighbours form groups by position (head i reads KV head ⌊i/r⌋), so
            that copies must stand side by side.
        multiples: sizes that the model class demands to be multiples of others.
        recomputed: endings of tensor names that old checkpoints hold and the class computes itself.
        duplicates: for tied models, names that may repeat a tensor, and that tensor.
    """

    name: str
    model_types: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    tensors: tuple[Tensor, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    multiples: tuple[Multiple, ...] = ()
    recomputed: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)

    def complete(self, config: Config) -> Config:
        """The config with the defaults filled in.

        Raises:
            InputError: a size is missing, is no positive number, or breaks a demand of the class.
        """
        complete = dict(config)
        for key, default in self.defaults.items():
            if complete.get(key) is None:
                try:
                    complete[key] = default(complete) if callable(default) else default
                except (KeyError, TypeError):
                    continue  # a size it depends on is bad, and is reported below
        for key, axes in self.axes.items():
            value = complete.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(
                    f"config.json of a {self.name} model needs {key} as a positive whole number, "
                    f"but has {value!r}"
                )
            if value % len(axes):
                raise InputError(
                    f"{key} is {value}, but a {self.name} model needs a multiple of {len(axes)}"
                )
        for demand in self.multiples:
            if complete[demand.key] % complete[demand.of]:
                raise InputError(
                    f"{demand.key} {complete[demand.key]} is no multiple of {demand.of} "
                    f"{complete[demand.of]}, but a {self.name} model needs that, {demand.why}; "
                    "choose other sizes"
                )
        return complete

    def sizes(self, config: Config) -> dict[str, int]:
        """The size of every axis."""
        complete = self.complete(config)
        sizes = {
            axis: complete[key] // len(axes) for key, axes in self.axes.items() for axis in axes
        }
        return sizes | dict(self.constants)

    def resized(self, config: Config, sizes: Mapping[str, int]) -> Config:
        """The config of a model whose axes have these sizes; all other keys stay as they are.

        Raises:
            InputError: the model class cannot express these sizes.
        """
        resized = dict(config)
        complete = self.complete(config)
        for key, axes in self.axes.items():
            if len({sizes[axis] for axis in axes}) > 1:
                listed = ", ".join(f"{axis} {sizes[axis]}" for axis in axes)
                raise InputError(
                    f"a {self.name} model has equal numbers behind {key}, not {listed}; "
                    "grow them alike"
                )
            value = sum(sizes[axis] for axis in axes)
            # A default may depend on other sizes (head_dim on hidden_size): it is written out.
            if (
                config.get(key) is not None
                or value != complete[key]
                or callable(self.defaults.get(key))
            ):
                resized[key] = value
        self.complete(resized)
        return resized

    def layouts(self, config: Config) -> dict[str, Layout]:
        """Name and layout of every tensor of the model, in the order of the layers."""
        complete = self.complete(config)
        present = [tensor for tensor in self.tensors if tensor.when(complete)]
        numbers = range(complete["num_hidden_layers"])
        layouts: dict[str, Layout] = {}
        for tensor in present:
            layout = Layout.parse(tensor.layout)
            for layer in numbers if "{layer}" in tensor.name else range(1):
                layouts[tensor.name.format(layer=layer)] = layout
        return layouts


def families() -> dict[str, Family]:
    """All families, by the name of their file."""
    found = members(sys.modules[__name__], "FAMILY")
    return {name: family for name, family in found.items() if isinstance(family, Family)}


def family_of(config: Config, where: str) -> Family:
    """The family of a config.

    Raises:
        InputError: no family knows this model_type; lists those that are known.
    """
    model_type = config.get("model_type")
    known = {kind: family for family in families().values() for kind in family.model_types}
    if config.get("quantization_config"):
        raise InputError(f"the model in {where} is quantised; dequantise it first")
    if not isinstance(model_type, str) or model_type not in known:
        raise InputError(
            f"{where} has model_type {model_type!r}, which no family describes; "
            f"known are {', '.join(sorted(known))}"
        )
    return known[model_type]
