"""Settings that matter only from some number of tokens on, such as windows, with lower values.

A prompt shorter than a window computes what it would compute without one, and does not depend on
the weights that choose which tokens to read. A lower value of such a setting, in memory and in both
models alike, shows in a short prompt what the setting does in a long one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import PreTrainedConfig

from growkit.base.tensors import Config
from growkit.base.torch_internals import buffers_of, saved_buffers
from growkit.engine.class_weights import build
from growkit.engine.transformers_class import resolved
from growkit.engine.user_family import tensors_digest
from growkit.model.families.family_parts import leaves, with_value
from growkit.model.model import Model

THRESHOLD = re.compile(r"(?i)window|chunk|top_?k|budget|block|local|compress|span|segment|distance")
"""Names of keys whose value may be a number of tokens, or of groups of tokens."""

OTHERS = re.compile(r"(?i)layer|expert|moe|group|vision|audio|image")
"""Names of keys that are numbers of other things."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module of torch has."""

LOW = 4
"""The lower value: with it, a prompt of 21 tokens has several windows, and blocks of windows."""


MORE = 48
"""Tokens by which a prompt is longer than a setting that cannot have a lower value."""

FARTHEST = 1 << 11
"""Limit for the tokens of such a prompt."""


def reach(*configs: Config) -> int:
    """The tokens of a prompt that is longer than every setting without a lower value.

    Args:
        configs: configs of models.

    Returns:
        Their number; 0 if there is no such setting, or none below ``FARTHEST``.
    """
    low, values = lowered(*configs), _thresholds(configs)
    tokens = [value + MORE for key, value in values.items() if key not in low]
    return max((count for count in tokens if count <= FARTHEST), default=0)


def lowered(*configs: Config) -> dict[str, int]:
    """Lower values for settings that are the same in all configs, by their keys.

    Args:
        configs: configs of models; a dot in a key leads into a part of them.
    """
    low = dict.fromkeys(_thresholds(configs), LOW)

    def fits(changes: Mapping[str, int]) -> bool:
        pairs = [(config, changed(config, changes)) for config in configs]
        return all(
            tensors_digest(lower) == tensors_digest(config)
            and _lists(resolved(lower) or lower) == _lists(resolved(config) or config)
            for config, lower in pairs
        )

    # A size of tensors, a period of kinds of layers, or not possible with the other settings.
    if low and not fits(low):
        return {key: value for key, value in low.items() if fits({key: value})}
    return low


def _thresholds(configs: Sequence[Config]) -> dict[str, int]:
    """The values above ``LOW`` of such settings, by their keys."""
    numbers = [dict(leaves(resolved(config) or config)) for config in configs]
    return {
        key: value
        for key, value in numbers[0].items()
        if THRESHOLD.search(key)
        and not OTHERS.search(key)
        and value > LOW
        and all(config.get(key) == value for config in numbers)
    }


def _lists(config: Config) -> dict[str, Any]:
    """All lists in a config, such as the kinds of layers, by key."""
    inner = {key: _lists(value) for key, value in config.items() if isinstance(value, dict)}
    return inner | {key: value for key, value in config.items() if isinstance(value, list)}


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of some keys."""
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


class Changed:
    """What differs in the modules of a model if some of its settings have other values.

    Buffers that files hold stay: the class computes them only where there is no file.

    Args:
        model: the model.
        weights: its weights, with its config.
        settings: the other values, by key; a dot leads into a part of the config.

    Raises:
        InputError: the class cannot have them.
    """

    def __init__(self, model: Any, weights: Model, settings: Mapping[str, Any]) -> None:
        other = build(weights, changed(weights.config, settings), model.dtype)
        self._changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._compared: set[int] = set()
        of_other = dict(other.named_modules())
        for name, module in model.named_modules():
            if name in of_other:  # else it was added to the class
                self._compare(vars(module), vars(of_other[name]))
                buffers = buffers_of(of_other[name])
                self._compare(buffers_of(module), buffers, saved_buffers(module))
                self._replace_functions(module._modules, of_other[name]._modules)

    def _replace_functions(
        self, mine: dict[str, nn.Module | None], others: Mapping[str, nn.Module | None]
    ) -> None:
        """Take the other's modules that only compute a function, such as an activation."""
        functions = {
            key: other
            for key, other in others.items()
            if type(other) is not type(mine.get(key)) and not (other and other.state_dict())
        }
        if functions:
            self._changes.append((mine, functions))

    def _compare(
        self, mine: dict[str, Any], others: Mapping[str, Any], kept: Set[str] = MODULE_ATTRIBUTES
    ) -> None:
        if id(mine) in self._compared:
            return
        self._compared.add(id(mine))
        both = mine.keys() & others.keys() - kept
        differing = {key: others[key] for key in both if _differ(mine[key], others[key])}
        if differing:
            self._changes.append((mine, differing))
        for key in both:
            if isinstance(mine[key], PreTrainedConfig) and isinstance(
                others[key], PreTrainedConfig
            ):
                self._compare(vars(mine[key]), vars(others[key]))

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self._changes)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the model with the other values inside this context."""
        with ExitStack() as patched:
            for mine, others in self._changes:
                patched.enter_context(patch.dict(mine, others))
            yield


def _differ(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape != other.shape or not value.cpu().equal(other.to(value.dtype))
    return _is_plain(value) and _is_plain(other) and value != other


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)
