"""Descriptions of families that growkit has none of, inferred from their classes."""

import time
from collections.abc import Mapping
from typing import Any

from growkit.base.tensors import Config


def describe(config: Config, where: str) -> tuple[Mapping[str, Any], str] | None:
    """Describe the family of a model.

    Args:
        config: contents of its ``config.json``.
        where: name of the config in messages.

    Returns:
        The description, and how it was inferred, in a sentence; None if transformers has no class
        for the model.

    Raises:
        InputError: parts of its class cannot be described.
    """
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    from growkit.extras.family_inference.inferring import inferred_family

    started = time.perf_counter()
    inferred = inferred_family(config, where)
    seconds = time.perf_counter() - started
    tried = "every axis tried"
    if fixed := inferred.description.get("fixed"):
        tried += f"; {' and '.join(fixed)} cannot grow"
    how = f"family inferred from {inferred.asked.name} in {seconds:.1f} s, {tried}"
    return inferred.description, how
