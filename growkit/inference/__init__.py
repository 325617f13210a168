"""Families that growkit has no description of, inferred from their classes in transformers."""

import time
from collections.abc import Mapping
from typing import Any

from growkit.checkpoint.dequantising import dense_config
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import MOST_DIGITS
from growkit.families.family import known_family
from growkit.sources import Source, config_inside, with_keys_of_class


def family_for(
    source: Source, family: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str | None]:
    """The description of a source's family, which is inferred if growkit has none of its type.

    Args:
        source: the source.
        family: a description by a user; None for none.

    Returns:
        The description, None if growkit's own is used; and how it was inferred, in a sentence.

    Raises:
        InputError: parts of its class cannot be described, or its quantised weights are not read.
    """
    config = Folder(source.folder).json("config.json", MOST_DIGITS)
    kind = config.get("model_type")
    if family is not None or not isinstance(kind, str) or known_family(kind):
        return family, None
    where = str(source.folder / "config.json")
    config, _ = dense_config(config, where)
    config = config_inside(config, source.folder) or with_keys_of_class(config)
    kind = config.get("model_type")
    if known_family(kind):
        return None, None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None, None
    from growkit.inference.inferring import InferredFamily

    started = time.perf_counter()
    found = InferredFamily(config, where)
    seconds = time.perf_counter() - started
    tried = "every axis tried"
    if fixed := found.description.get("fixed"):
        tried += f"; {' and '.join(fixed)} cannot grow"
    return found.description, f"family inferred from {found.asked.name} in {seconds:.1f} s, {tried}"
