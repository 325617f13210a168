"""The methods of PEFT that growkit grows: the tensors of each, and the settings that matter.

What a tensor follows says how it grows. An update of low rank, B·A, goes through the same map as
its weight: B is copied where that writes, A is split where it reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from growkit.base.errors import InputError
from growkit.base.parsing import ANY, check_kind
from growkit.base.tensors import Config

RANK, IN, OUT, COLUMNS = "rank", "in", "out", "columns"
"""What a dimension follows: nothing, as it counts ranks or tokens; what the module reads or writes;
or the columns of its weight, whichever that is."""

MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class Part:
    """A kind of tensors in adapters.

    Attributes:
        sides: what each of its dimensions follows.
        scaled: whether it takes what the weight is multiplied by.
        copied: whether it is copied where the weight is split.
    """

    sides: tuple[str, ...]
    scaled: bool = False
    copied: bool = False


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        parts: its tensors, by the end of their names behind that of the module.
        settings: keys of ``adapter_config.json`` that decide on what an adapter computes, and what
            kinds of values they have.
        without_effect: keys that do not, once an adapter is trained.
    """

    parts: Mapping[str, Part]
    settings: Mapping[str, Any]
    without_effect: frozenset[str]


_NAMES = (str, [str])
_CHOOSING = {"target_modules": _NAMES, "exclude_modules": _NAMES, "modules_to_save": [str]}
_BY_LAYER = {
    "r": int,
    "layers_to_transform": (int, [int]),
    "layers_pattern": _NAMES,
    "rank_pattern": {ANY: int},
    "alpha_pattern": {ANY: float},
}
_SWITCHES = ("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
_ALWAYS = {"peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"}
_ALWAYS |= {"inference_mode", "peft_version", "runtime_config"}

METHODS = {
    "LORA": Method(
        {
            "lora_A.weight": Part((RANK, IN)),
            "lora_B.weight": Part((OUT, RANK), scaled=True),
            "lora_B.bias": Part((OUT,), scaled=True),
            "lora_embedding_A": Part((RANK, IN)),
            "lora_embedding_B": Part((OUT, RANK), scaled=True),
            MAGNITUDE: Part((OUT,)),
            "token_adapter.trainable_tokens_delta": Part((RANK, COLUMNS), scaled=True),
        },
        {
            **(_CHOOSING | _BY_LAYER | dict.fromkeys(_SWITCHES, bool)),
            "lora_alpha": float,
            "lora_dropout": float,
            "bias": str,
            "target_parameters": [str],
            "trainable_token_indices": ([int], {ANY: [int]}),
        },
        frozenset({*_ALWAYS, "init_lora_weights", "megatron_core", "qalora_group_size"})
        | {"loftq_config", "eva_config"},
    ),
    "IA3": Method(
        {"ia3_l": Part((OUT, IN), copied=True)},  # one of the two is 1
        {**_CHOOSING, "feedforward_modules": _NAMES, "fan_in_fan_out": bool},
        frozenset({*_ALWAYS, "init_ia3_weights"}),
    ),
    "LOHA": Method(
        {
            "hada_w1_a": Part((OUT, RANK), scaled=True),
            "hada_w1_b": Part((RANK, IN)),
            "hada_w2_a": Part((OUT, RANK)),
            "hada_w2_b": Part((RANK, IN), copied=True),
        },
        {**_CHOOSING, **_BY_LAYER, "alpha": float, "rank_dropout": float, "module_dropout": float},
        frozenset({*_ALWAYS, "init_weights", "use_effective_conv2d"}),
    ),
}
"""By the ``peft_type`` of their configs."""

BEGUN_WITH = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Ways to begin LoRA (``init_lora_weights``) that leave the weights of the model as they are."""

DEFAULT = 8
"""Of ranks and of alpha, in PEFT."""

MERGE = "merge it into SRC first (merge_and_unload), and grow that"


def method_of(config: Config, where: str) -> Method:
    """The method of an adapter.

    Args:
        config: contents of its ``adapter_config.json``.
        where: that file, for messages.

    Raises:
        InputError: it is none that growkit grows, or has a setting that is not known.
    """
    method = METHODS.get(str(config.get("peft_type")))
    if method is None:
        raise InputError(
            f"{where} is of {config.get('peft_type')!r}, which does not grow with the weights of "
            f"a model; growkit grows {', '.join(METHODS)}, {MERGE}"
        )
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise InputError(f"{where} is for {task}; growkit grows adapters of causal language models")
    if (begun := config.get("init_lora_weights")) not in BEGUN_WITH:
        raise InputError(
            f"{where} has init_lora_weights {begun!r}, with which peft changes the weights of the "
            "model; save it as a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key in method.settings and value is not None:
            check_kind(value, method.settings[key], f"{key} in {where}")
            for pattern in value if key.endswith("_pattern") else ():
                _check_pattern(pattern, f"{key} in {where}")
        elif value and key not in method.without_effect:
            raise InputError(f"{where} has {key}, with which growkit grows no adapter; {MERGE}")
    return method


def _check_pattern(pattern: str, what: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{what} has the pattern {pattern!r}, {error}; correct it") from None


def scaling(config: Config, module: str, rank: int) -> float:
    """What LoRA multiplies B·A of a module with.

    Args:
        config: contents of ``adapter_config.json``.
        module: its name.
        rank: of its matrices.
    """
    own = pattern_value(config, "alpha_pattern", module)
    alpha = float(config.get("lora_alpha", DEFAULT) if own is None else own)
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def pattern_value(config: Config, key: str, module: str) -> Any:
    """A setting for single modules, of the first pattern that fits, as in PEFT; None for none."""
    found = (config.get(key) or {}).items()
    return next((value for each, value in found if re.match(rf"(.*\.)?({each})$", module)), None)
