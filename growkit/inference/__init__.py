"""Families that growkit has no description of, inferred from their classes in transformers."""

import time
from collections.abc import Mapping
from typing import Any

from growkit.checkpoint.dequantising import dense_config
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import MOST_DIGITS
from growkit.engine.user_family import described_family
from growkit.families.family import Family, known_family
from growkit.sources import Source, config_inside, with_keys_of_class


def family_for(source: Source, description: Mapping[str, Any] | None) -> Family | None:
    """The described family of a source, which is inferred if growkit has none of its type.

    Args:
        source: the source.
        description: a description by a user; None for none.

    Returns:
        The family; None if growkit's own describe the source.

    Raises:
        InputError: the description is invalid, parts of its class cannot be described, or its
            quantised weights are not read.
    """
    config = Folder(source.folder).json("config.json", MOST_DIGITS)
    kind = config.get("model_type")
    if description is not None or not isinstance(kind, str) or known_family(kind):
        return described_family(description)
    where = str(source.folder / "config.json")
    config, _ = dense_config(config, where)
    config = config_inside(config, source.folder) or with_keys_of_class(config)
    kind = config.get("model_type")
    if known_family(kind):
        return None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    from growkit.inference.inferring import InferredFamily

    started = time.perf_counter()
    found = InferredFamily(config, where)
    seconds = time.perf_counter() - started
    tried = "every axis tried"
    if fixed := found.description.get("fixed"):
        tried += f"; {' and '.join(fixed)} cannot grow"
    how = f"family inferred from {found.asked.name} in {seconds:.1f} s, {tried}"
    return described_family(found.description, how)
