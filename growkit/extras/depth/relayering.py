"""The configs of models that consist of layers of others: what they list for each layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.model.families.family import Family, Layer, rearranged


def relayered(
    family: Family, config: Config, layers: Sequence[Layer], where: str, *, arrange: bool = True
) -> Config:
    """Make the config of a model that consists of layers of another one, in this order.

    Args:
        family: the family of both models.
        config: config of the other model.
        layers: the layers.
        where: the other model's name in messages.
        arrange: whether other keys that determine the kinds of layers (``arranged``) follow.

    Raises:
        InputError: a list does not have one entry per layer.
    """
    before = dict(family.complete(config))
    count = family.sizes(config)["layers"]
    lists = dict(added_lists(family, before))
    for key in family.lists | family.per_layer:
        values = before.get(key)
        if values is None or (key in family.per_layer and not isinstance(values, list)):
            continue
        if not isinstance(values, list) or len(values) < count:
            raise InputError(
                f"config.json in {where} has {key} {values!r}; a list of {count} was expected, "
                "one entry for each layer, correct it"
            )
        lists.setdefault(key, values)
    lists = {key: [layer.entry(key, of) for layer in layers] for key, of in lists.items()}
    known = {*family.lists, *family.per_layer, *family.defaults}
    unknown = {key: value for key, value in config.items() if key not in known}
    deeper = {**config, **rearranged(unknown, layers, count)}
    deeper |= {key: len(layers) for key, axes in family.axes.items() if axes == ("layers",)}
    complete = before | deeper | lists
    for key, values in lists.items():
        if config.get(key) is not None or values != family.assumed(key, complete):
            deeper[key] = values
    arranged = family.arranged(before, [layer.of for layer in layers]) if arrange else {}
    after = family.complete(deeper)
    return deeper | {key: value for key, value in arranged.items() if value != after.get(key)}


def added_lists(family: Family, config: Config) -> Mapping[str, list[Any]]:
    """The lists with one entry for each layer that only the class adds to a config."""
    if family.class_lists is None:
        return {}
    count, lists = config[family.layers_key], family.class_lists(config)
    of_layers = derived_lists(family, {**config, family.layers_key: count + 1})
    return {
        key: lists[key]
        for key in lists.keys() & of_layers.keys()
        if config.get(key) is None and len(lists[key]) == count
    }


def derived_lists(family: Family, config: Config) -> Mapping[str, list[Any]]:
    """The lists with one entry for each layer that the class makes of all other keys.

    Other software derives the types of layers like this even where a config lists them.
    """
    bare = {key: value for key, value in config.items() if not isinstance(value, list)}
    lists = family.class_lists(bare) if family.class_lists else family.filled_in(bare)
    count = bare.get(family.layers_key)  # None if only a list says it: nothing derives from it
    return {
        key: value
        for key, value in lists.items()
        if isinstance(value, list)
        and len(value) == count
        and (family.class_lists or key in family.lists)
    }
