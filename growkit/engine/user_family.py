"""Families that users describe, and what the class of a config shows of its settings."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from typing import Any

from growkit.base.lazy import of_extras
from growkit.base.tensors import Config
from growkit.engine.transformers_class import model_without_numbers, parsed, quiet
from growkit.model.families.family import Family, described

CONTEXT = "max_position_embeddings"

NAMED = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    CONTEXT: "positions",
}
"""Axes of transformers' common config keys for sizes."""


def described_family(description: Mapping[str, Any] | None, inferred: str = "") -> Family | None:
    """The family of a description, checked against its class for every model; None for none.

    Args:
        description: see ``growkit.model.families.family_yaml``.
        inferred: how it was inferred, in a sentence; empty if it was not.

    Raises:
        InputError: the description is invalid.
    """
    if description is None:
        return None
    plain = described(description, "the description of the family")
    for extra in of_extras("descriptions"):
        plain = import_module(extra).checked(plain, description)
    return replace(
        plain,
        class_lists=lambda config: _class_lists(json.dumps(config)),
        description=description,
        inferred=inferred or None,
    )


@lru_cache
def _class_lists(config: str) -> Mapping[str, list[Any]]:
    """The lists that a class adds to a config, in JSON; see ``Family.class_lists``."""
    with suppress(Exception), quiet():  # a config that its class refuses has no lists
        lists = parsed(json.loads(config)).to_dict().items()
        return {key: value for key, value in lists if isinstance(value, list)}
    return {}


def shown_by_tensors(key: str, first: Config, second: Config) -> bool:
    """Whether a class has other tensors if one of two configs has the other's value of a key.

    The tensors in a file then show that value. So they do if the value is a number that the class
    refuses in the other config, as it does not fit the sizes there, and the reverse.
    """
    if key not in first or key not in second:
        return False
    pairs = [(first, second[key]), (second, first[key])]
    changed = [tensors_digest({**config, key: value}) for config, value in pairs]
    built = [tensors_digest(config) for config in (first, second)]
    forced = all(type(value) is int for _, value in pairs) and None not in built
    if changed == [None, None]:
        return forced
    return any(new not in (None, old) for new, old in zip(changed, built, strict=True))


def empty_model_of(config: Config) -> Any:
    """Build the model of a config without weights; None if transformers cannot."""
    with suppress(Exception):
        return model_without_numbers(config)
    return None


def tensors_digest(config: Config) -> str | None:
    """A digest of names, shapes and ties of all tensors of a config's model.

    None if transformers cannot build it.
    """
    return _digest(json.dumps(config, sort_keys=True))


@lru_cache(1 << 12)  # every axis is tried with the same configs
def _digest(config: str) -> str | None:
    model = empty_model_of(json.loads(config))
    if model is None:
        return None
    shapes = [f"{name} {[*tensor.shape]}" for name, tensor in model.state_dict().items()]
    shapes += [name for name, _ in model.named_parameters()]  # without those that are tied
    return sha256("\n".join(sorted(shapes)).encode()).hexdigest()
