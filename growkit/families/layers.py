"""What a family's layers are: which of their tensors write, and what a config says of each.

Layers may come in another order, or more than once: what belongs to a layer goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from growkit.algebra.axes import Pattern, Role
from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import Tensor
from growkit.families.family import Family


def windows(has: Callable[[Config, int], bool]) -> Callable[[Config], list[str]]:
    """The default of ``layer_types`` where some layers look through a window."""
    return lambda config: [
        "sliding_attention" if has(config, layer) else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def every(count: int, key: str = "") -> Callable[[Config, int], bool]:
    """A window in all layers but every fourth, say; ``key`` is the config's, where it has one."""
    return lambda config, layer: bool((layer + 1) % config.get(key, count))


def writers(family: Family, config: Config) -> frozenset[str]:
    """Names of the tensors of a layer that write what it adds to the hidden states.

    If all of them are zero, as the class has them, the layer hands on what it is given. Those are
    the last matrices of attention and MLP with their biases; or the norms behind these.
    """
    inside = [tensor for _, tensor, layer in family.members(config) if layer is not None]
    norms = {_module(each) for each in inside if each.norm}
    behind = {_module(each) for each in inside if each.norm and each.norm.behind}
    return frozenset(
        each.name
        for each in inside
        if _writes_hidden(each)
        and (_module(each) in behind if behind else _module(each) not in norms)
    )


def _module(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _writes_hidden(tensor: Tensor) -> bool:
    dimensions = Pattern.parse(tensor.pattern).dimensions
    return any(each.role is Role.WRITTEN and each.axes == {"hidden"} for each in dimensions)


def relayered(family: Family, config: Config, layers: Sequence[int], where: str) -> Config:
    """The config of a model whose layers come from these of another one.

    Args:
        family: of both.
        config: of the other model.
        layers: for each layer the number of the one that it comes from.
        where: what to call the other model in messages.

    Raises:
        InputError: a list has no entry for each layer, or nobody knows whether it should.
    """
    before = dict(family.complete(config))
    count = family.sizes(config)["layers"]
    key_of_count = next(key for key, axes in family.axes.items() if axes == ("layers",))
    lists = {}
    for key in family.lists | family.per_layer:
        values = before.get(key)
        if values is None or (key in family.per_layer and not isinstance(values, list)):
            continue
        if not isinstance(values, list) or len(values) < count:
            raise InputError(
                f"config.json in {where} has {key} {values!r}; a list of {count} was expected, one "
                "entry for each layer, correct it"
            )
        lists[key] = [values[layer] for layer in layers]
    for key, values in config.items():
        per_layer = isinstance(values, list) and len(values) == count and "layer" in key
        if per_layer and key not in lists and key not in family.defaults:
            raise InputError(
                f"config.json in {where} has {key} with {count} entries, which growkit does not "
                f"know in a {family.name} model; remove it, if it says nothing of the layers"
            )
    deeper = {**config, key_of_count: len(layers)}
    for key, values in lists.items():
        if config.get(key) is not None or values != _assumed(family, key, before | deeper | lists):
            deeper[key] = values
    arranged = family.arranged(before, layers)
    after = family.complete(deeper)
    return deeper | {key: value for key, value in arranged.items() if value != after.get(key)}


def _assumed(family: Family, key: str, complete: Config) -> Any:
    """What a class makes of a config that lacks a key."""
    default = family.defaults.get(key)
    return default(complete) if callable(default) else default
