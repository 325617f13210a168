"""Checks of families that users describe, or that are inferred, against their class.

A wrong matrix shows in every logit, but a wrong window, number of tokens or table row may show in
none. So a config key is a size only if some tensor's shape in the class depends on it, and tables
that the class indexes by number keep their rows in place.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from growkit.base.axes import Axis
from growkit.base.errors import InputError
from growkit.base.lazy import torch
from growkit.base.tensors import Config
from growkit.engine.transformers_class import (
    OLDER_ROPE_KEYS,
    PROVENANCE_KEYS,
    aliases,
    parsed,
    quiet,
)
from growkit.engine.user_family import CONTEXT, NAMED, empty_model_of, tensors_digest
from growkit.extras.depth.relayering import relayered
from growkit.model.families.family import Family, Layer, families, known_family
from growkit.model.families.family_parts import value_at, with_value
from growkit.planning.operation import SizeOption, operations

ALSO = {"num_kv_heads": "kv_heads"} | dict.fromkeys(
    ("ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "inner_dim"), "ffn"
)
"""Alternative keys, for classes that lack some common ones."""

ALWAYS_SIZES = {*NAMED, *ALSO} - {CONTEXT}
"""Keys that are sizes in every class; if heads split hidden, no shape depends on their number."""

RESERVED_KEYS = ("published_as", "architecture", "loads_with", "form", "former")
"""Keys reserved for growkit's own descriptions: promises that no class can confirm."""

EXPERT_KEYS = r"expert|moe_|rout"
"""A part of every key of experts and routers."""

_sound: set[tuple[str, str]] = set()
"""Descriptions and configs, as JSON, that fit their classes: a proof plans what grew again."""

_sizes: set[tuple[str, str, str]] = set()
"""Names of classes, keys that change some of their shapes, and with which settings, as JSON."""


def checked(family: Family, description: Mapping[str, Any]) -> Family:
    """A family that checks its description against its class for every model.

    Args:
        family: the family of the description.
        description: see ``growkit.model.families.family_yaml``.

    Raises:
        InputError: the description makes a claim that no class confirms.
    """
    _check_promises(family, description)
    text = json.dumps(description, sort_keys=True, default=str)

    def arranged(config: Config, layers: Sequence[int]) -> Config:
        changed = family.arranged(config, layers)
        _check_arranged(family, config, layers, changed)
        return changed

    def check(config: Config) -> None:
        family.check(config)
        written = json.dumps(config, sort_keys=True, default=str)
        if (text, written) not in _sound:  # the check builds models
            check_against_class(family, config)
            _sound.add((text, written))

    return replace(family, check=check, arranged=arranged)


def _check_promises(family: Family, description: Mapping[str, Any]) -> None:
    """Refuse claims of a description that neither a class nor a prompt can confirm.

    Raises:
        InputError: the description makes such a claim; the message names the key.
    """
    for key in RESERVED_KEYS:
        if description.get(key) is not None:
            raise InputError(
                f"the description of {family.name} has {key}, which only growkit's own families "
                "may have; remove it"
            )
    own = (family.experts.keys for family in families().values() if family.experts)
    for key in family.experts.keys.difference(*own) if family.experts else ():
        if re.search(EXPERT_KEYS, key):
            continue
        raise InputError(
            f"the description of {family.name} has {key} among its experts, but its name does "
            "not look like a setting of experts; correct it"
        )


def check_against_class(family: Family, config: Config) -> None:
    """Refuse a description that lists settings as sizes, or gives table rows a wrong axis.

    A model without a class in transformers passes; nothing can be proved of it either.

    Args:
        family: the described family.
        config: the complete config of a model.

    Raises:
        InputError: the description does not fit; the message names the key or the tensor.
    """
    # What a description computes may be a name of another key, as head_dim of Zamba 2.
    other_names = family.derived & aliases(config).keys()
    config = {key: value for key, value in config.items() if key not in other_names}
    model = empty_model_of(config)
    if model is not None:  # else it is reported when the model is loaded
        _check_sizes(family, config, model)
        _check_tables(family, model)
        _check_shapes(family, config, model)


def _check_shapes(family: Family, config: Config, model: Any) -> None:
    """Refuse sizes for which the class makes other tensors; it may round a size.

    Files may store a tensor transposed.
    """
    patterns, sizes = family.patterns(config), family.sizes(config)
    for name, tensor in model.state_dict().items():
        expected = patterns[name].shape(sizes) if name in patterns else tensor.shape
        if sorted(expected) != sorted(tensor.shape):
            raise InputError(
                f"with these sizes {name} of {type(model).__name__} has shape "
                f"{[*tensor.shape]}, but {[*expected]} would be made; choose other sizes"
            )


def _check_sizes(family: Family, config: Config, model: Any) -> None:
    cls, grown, digest = type(model).__name__, _grown_axes(), tensors_digest(config)
    names = {short: common for common, short in model.config.attribute_map.items()}
    ratios = {key: (*over, under) for key, (over, under) in family.ratios.items()}
    sized = family.axes_of(config)
    settings = {key: value for key, value in config.items() if key not in {*sized, *ratios}}
    for key, value in settings.items():  # kinds of layers have sizes, whatever their order
        if isinstance(value, list) and len(value) == config.get(family.layers_key):
            settings[key] = sorted({json.dumps(entry, default=str) for entry in value})
    said = json.dumps(settings, sort_keys=True, default=str)
    partners = {
        key: [other for other, of in others.items() if {*axes} & {*of}]
        for keys, others in ((sized, ratios), (ratios, sized))
        for key, axes in keys.items()
    }
    for key, axes in {**sized, **ratios}.items():
        common = names.get(key, key)
        as_described = f"the description of {family.name} has sizes {key}: {' + '.join(axes)}, but"
        if axes != ("vocab",) if common == "vocab_size" else "vocab" in axes:
            raise InputError(
                f"{as_described} vocab is the number of tokens and nothing else; correct the "
                "description"
            )
        if common == CONTEXT and grown & {*axes}:
            raise InputError(
                f"{as_described} the length of the context does not grow with anything; give it "
                "an axis of its own, positions"
            )
        computed = "head" in key and axes == ("heads",) and "head_dim" in family.derived
        counted = axes == ("layers",) and _counts_layers(key, config)
        if common in ALWAYS_SIZES or computed or counted or (cls, key, said) in _sizes:
            continue
        if not _changes_shapes(key, config, digest, partners[key]):
            raise InputError(
                f"the description of {family.name} has {key} among its sizes, but no tensor of "
                f"{cls} has another shape with another {key}, so it is a setting; remove it from "
                "sizes"
            )
        _sizes.add((cls, key, said))


def _counts_layers(key: str, config: Config) -> bool:
    """Whether the number of layers that other code reads, as for caches, is that of a key."""
    with suppress(Exception), quiet():
        more = config[key] + 1
        return bool(parsed({**config, key: more}).num_hidden_layers == more)
    return False


def _check_tables(family: Family, model: Any) -> None:
    """Check the row axes of embeddings, and of the head, whose rows belong to tokens."""
    cls, grown, head = type(model).__name__, _grown_axes(), model.get_output_embeddings()
    for table, module in model.named_modules():
        if not (isinstance(module, torch.nn.Embedding) or module is head):
            continue
        for tensor in family.tensors:
            template = re.escape(tensor.name).replace(re.escape("{layer}"), r"\d+")
            names = (f"{table}.weight", f"{table}.weight".partition(".")[2])
            if not any(re.fullmatch(template, name) for name in names):
                continue
            form = tensor.dimensions[0].form
            if form != Axis("vocab") and grown & {*form.axes()}:
                raise InputError(
                    f"the description of {family.name} has {form} as the rows of tensor "
                    f"{table}.weight, which {cls} takes by number; correct it, vocab for tokens "
                    "or an axis that does not grow"
                )


def _check_arranged(family: Family, config: Config, layers: Sequence[int], changed: Config) -> None:
    """Refuse a description that changes settings when layers are rearranged.

    Raises:
        InputError: no tensor of the class depends on the key.
    """
    copied = [Layer(of) for of in layers]
    deeper = dict(relayered(family, config, copied, "config.json", arrange=False))
    deeper |= {key: config.get(key) for key in changed}
    for key, value in changed.items():
        others = {**deeper, **{name: of for name, of in changed.items() if name != key}}
        if value != config.get(key) and not any(
            tensors_digest(config) != tensors_digest({**config, key: value})
            for config in (deeper, others)
        ):
            raise InputError(
                f"the description of {family.name} has arranged {key}, but no layer of its class "
                f"has other tensors with {key} {value!r}, so it is a setting; remove it"
            )


def _changes_shapes(key: str, config: Config, digest: str | None, partners: Iterable[str]) -> bool:
    """Whether another value of a key changes the tensors or their shapes.

    Args:
        key: of a size, or of a ratio of sizes.
        config: complete config of a model.
        digest: see ``tensors_digest``, of this config.
        partners: keys that a class may want to change with it.
    """
    value = value_at(config, key)
    if not isinstance(value, int):
        return False
    others = [with_value(config, key, other) for other in (2 * value, value + 1, value - 1, 1)]
    if tensors_digest(others[0]) is None:  # the class compares it with other keys
        sizes = {partner: value_at(config, partner) or 0 for partner in partners}
        others += [
            with_value(others[0], partner, other)
            for partner, size in sizes.items()
            for other in (2 * size, size // 2)
        ]
    return any(tensors_digest(other) not in (None, digest) for other in others)


def _grown_axes() -> set[str]:
    """Axes that some method grows."""
    options = (option for method in operations("grow").values() for option in method.options)
    return {axis for option in options if isinstance(option, SizeOption) for axis in option.axes}


def with_keys_of_class(config: Config) -> Config:
    """Write a config with old keys as its class saves it, if growkit does not describe its family.

    A class may read an old key in place of its own, as a pattern of letters for the kinds of
    layers. Growth would then change a key that the class does not read. Former names of kinds of
    layers become those of the class. What cannot be parsed stays as it is.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or known_family(config):
        return config
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return config
    with suppress(Exception), quiet():
        saved: Config = json.loads(parsed(config).to_json_string(use_diff=False))
        names = CONFIG_MAPPING[kind].attribute_map
        parts = _parts_read(config)
        if parts or config.keys() - {*saved, *names, *NAMED, *PROVENANCE_KEYS, *OLDER_ROPE_KEYS}:
            kept = {*NAMED, *PROVENANCE_KEYS} - {*names}
            dropped = {*PROVENANCE_KEYS, *parts}
            own = {key: value for key, value in saved.items() if key not in dropped}
            return own | {key: value for key, value in config.items() if key in kept}
        keys = {key: names.get(key, key) for key in config}
        renamed = {key for key, own in keys.items() if _renamed(config[key], saved.get(own))}
        rest = {key: value for key, value in config.items() if key not in renamed}
        return rest | {keys[key]: saved[keys[key]] for key in sorted(renamed)}
    return config


def _parts_read(config: Config) -> set[str]:
    """The parts of a config whose entries its class reads in place of keys of its own."""
    kind = {"model_type": config["model_type"]}
    own = parsed(kind).to_dict().keys() - PROVENANCE_KEYS
    parts = set()
    for key in config.keys() - own - PROVENANCE_KEYS - {*OLDER_ROPE_KEYS}:
        if isinstance(config[key], dict):
            numbers = {name: 2 * of for name, of in config[key].items() if type(of) is int}
            read, other = (
                parsed({**config, key: part}).to_dict() for part in (config[key], numbers)
            )
            parts |= {key} if any(read.get(name) != other.get(name) for name in own) else set()
    return parts


def _renamed(written: Any, read: Any) -> bool:
    """Whether a class reads a list of words, such as kinds of layers, as other words."""
    lists = isinstance(written, list) and isinstance(read, list) and len(written) == len(read)
    return lists and written != read and all(isinstance(word, str) for word in (*written, *read))
