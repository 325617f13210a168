"""Whether a description of a family agrees with the model's class where no prompt need show it.

A wrong matrix is in every logit. A window, the number of a token or the row of one token is not:
what a description takes for a size is one only if a tensor of the class has another shape with it,
and tables that are looked up by number keep their rows where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from growkit.algebra.axes import Axis, Pattern
from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.engine.oracle import parsed, quiet, uninitialised
from growkit.families.sizes import Axes
from growkit.inference.classes import ALSO, NAMED, unheard
from growkit.planning.operation import SizeOption
from growkit.recipe.recipe import operations

VOCABULARY = "vocab_size"
CONTEXT = "max_position_embeddings"
ALWAYS_SIZES = {*NAMED, *ALSO} - {CONTEXT}
"""Names of sizes in every class; where hidden is split into heads, no shape shows their number."""

Shapes = Mapping[str, tuple[int, ...]]


def check_against_class(
    name: str,
    sizes: Mapping[str, Axes],
    patterns: Sequence[tuple[str, Pattern]],
    config: Config,
) -> None:
    """Refuse a description that takes settings for sizes, or rows of a table for something else.

    A model without a class in transformers is not looked at; nor can anything be proved of it.

    Args:
        name: of the family.
        sizes: the axes behind every key that is described as a size.
        patterns: of every tensor, with its name in files, and ``{layer}`` in that.
        config: of a model, complete.

    Raises:
        InputError: names the key or the tensor.
    """
    built = _empty(config)
    if built is None:  # which is said where the model is loaded
        return
    read, model = built
    own = {short: common for common, short in read.attribute_map.items()}
    shapes = _shapes(model)
    grown = _grown_axes()
    for key, axes in sizes.items():
        common = own.get(key, key)
        if axes != ("vocab",) if common == VOCABULARY else "vocab" in axes:
            raise InputError(
                f"the description of {name} has sizes {key}: {' + '.join(axes)}, but vocab is the "
                "number of tokens and nothing else; correct the description"
            )
        if common == CONTEXT and grown & {*axes}:
            raise InputError(
                f"the description of {name} has sizes {key}: {' + '.join(axes)}, but the length of "
                "the context does not grow with anything; give it an axis of its own, positions"
            )
        if common not in ALWAYS_SIZES and not _shows(key, config, shapes):
            raise InputError(
                f"the description of {name} has {key} among its sizes, but no tensor of "
                f"{type(model).__name__} has another shape with another {key}, so it is a setting; "
                "remove it from sizes"
            )
    for table in _tables(model):
        for form in (each.dimensions[0].form for each in _of(f"{table}.weight", patterns)):
            if form != Axis("vocab") and grown & {*form.axes()}:
                raise InputError(
                    f"the description of {name} has {form} as the rows of tensor {table}.weight, "
                    f"which {type(model).__name__} takes by number; correct it, vocab for tokens "
                    "or an axis that does not grow"
                )


def assumed_lists(config: Config, layers: str) -> dict[str, list[Any]]:
    """Lists with one entry for each layer, which a config leaves to its class.

    Args:
        config: of a model.
        layers: the key of the number of its layers.
    """
    count = config[layers]
    bare = {key: value for key, value in config.items() if not isinstance(value, list)}
    found = []
    for config_of, number in ((config, count), (bare | {layers: count + 1}, count + 1)):
        with suppress(Exception), quiet(), unheard():
            lists = parsed(config_of).to_dict().items()
            found.append({k: v for k, v in lists if isinstance(v, list) and len(v) == number})
    said = {key for key, value in config.items() if value is not None}
    here, deeper = found if len(found) == 2 else ({}, {})
    return {key: here[key] for key in (here.keys() & deeper.keys()) - said}


def _empty(config: Config) -> tuple[Any, nn.Module] | None:
    """A config as its class reads it, and its model without any numbers; None if there is none."""
    from transformers import AutoModelForCausalLM

    with suppress(Exception), quiet(), unheard(), torch.device("meta"), uninitialised():
        read = parsed(config)
        return read, AutoModelForCausalLM.from_config(read, trust_remote_code=False)
    return None


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _shows(key: str, config: Config, shapes: Shapes) -> bool:
    """Whether a tensor has another shape, or there are others, with another value of a key."""
    value = config[key]
    others = (_empty({**config, key: other}) for other in (2 * value, value + 1, value - 1, 1))
    return any(built is not None and _shapes(built[1]) != shapes for built in others)


def _grown_axes() -> set[str]:
    """Axes that some method grows."""
    options = (each for method in operations("grow").values() for each in method.options)
    return {axis for each in options if isinstance(each, SizeOption) for axis in each.axes}


def _tables(model: Any) -> Iterator[str]:
    """Modules that look rows up by number, and the one whose rows are tokens' logits."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or module is head:
            yield name


def _of(parameter: str, patterns: Sequence[tuple[str, Pattern]]) -> list[Pattern]:
    """The patterns of a parameter, by its name in the class or that without the first part."""
    names = {parameter, parameter.partition(".")[2]}
    return [
        pattern
        for template, pattern in patterns
        if any(re.fullmatch(_expression(template), name) for name in names)
    ]


def _expression(template: str) -> str:
    return re.escape(template).replace(re.escape("{layer}"), r"\d+")
