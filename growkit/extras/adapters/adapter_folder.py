"""The folder of an adapter, as PEFT saves it, and the methods of PEFT that growkit grows.

A tensor grows with the dimensions of the weight that it adapts. A low-rank update B·A goes through
the same map as its weight: B is copied where the weight writes, A is split where the weight reads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from growkit.base.errors import InputError
from growkit.base.parsing import ANY, check_kind
from growkit.base.tensors import Config, Weights
from growkit.model.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, Folder
from growkit.model.checkpoint.weight_file import open_weights

RANK, IN, OUT, COLUMNS = "rank", "in", "out", "columns"
"""Meaning of a dimension: ranks or tokens, which do not grow; inputs or outputs of the module; or
the columns of its weight, which may be either."""

MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class TensorKind:
    """A kind of tensors in adapters.

    Attributes:
        sides: meaning of each dimension.
        scaled: whether the tensor is multiplied by the weight's factor.
        copied: whether the tensor is copied where the weight is split.
    """

    sides: tuple[str, ...]
    scaled: bool = False
    copied: bool = False


@dataclass(frozen=True)
class Method:
    """A method of PEFT.

    Attributes:
        kinds: kinds of tensors, by their names after the module's name.
        settings: keys of ``adapter_config.json`` that affect the adapter's function, with the types
            of their values.
        without_effect: keys that have no effect after training.
    """

    kinds: Mapping[str, TensorKind]
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
            "lora_A.weight": TensorKind((RANK, IN)),
            "lora_B.weight": TensorKind((OUT, RANK), scaled=True),
            "lora_B.bias": TensorKind((OUT,), scaled=True),
            "lora_embedding_A": TensorKind((RANK, IN)),
            "lora_embedding_B": TensorKind((OUT, RANK), scaled=True),
            MAGNITUDE: TensorKind((OUT,)),
            "token_adapter.trainable_tokens_delta": TensorKind((RANK, COLUMNS), scaled=True),
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
        {"ia3_l": TensorKind((OUT, IN), copied=True)},  # one of the two is 1
        {**_CHOOSING, "feedforward_modules": _NAMES, "fan_in_fan_out": bool},
        frozenset({*_ALWAYS, "init_ia3_weights"}),
    ),
}
"""The methods, by ``peft_type``."""

INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` with which the model's own weights stay unchanged."""

WHOLE_NAME = r"(.*\.)?({})$"
"""How PEFT compares a pattern of ranks or alphas with the name of a module."""

DEFAULT = 8
"""PEFT's default for ranks and for alpha."""

MERGE = "merge it into SRC first (merge_and_unload), and grow that"


def method_of(config: Config, where: str) -> Method:
    """Find the method of an adapter, and check its settings.

    Args:
        config: contents of its ``adapter_config.json``.
        where: that file, for messages.

    Raises:
        InputError: growkit does not grow the method, or does not know a setting.
    """
    method = METHODS.get(str(config.get("peft_type")))
    if method is None:
        raise InputError(
            f"{where} has peft_type {config.get('peft_type')!r}, which does not grow with the "
            f"weights of a model; growkit grows {', '.join(METHODS)}; {MERGE}"
        )
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise InputError(
            f"{where} has task_type {task}; growkit grows adapters of causal language models"
        )
    if (initial := config.get("init_lora_weights")) not in INITIAL:
        raise InputError(
            f"{where} has init_lora_weights {initial!r}, with which PEFT changes the model's own "
            "weights; save it as a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key in method.settings and value is not None:
            check_kind(value, method.settings[key], f"{key} in {where}")
        elif value and key not in method.without_effect:
            raise InputError(f"{where} has {key}, with which growkit cannot grow it; {MERGE}")
    return method


BY_MATCHING = (
    "import json, re, sys\nfor at, (pattern, way, names) in enumerate(json.load(sys.stdin)):\n"
)
BY_MATCHING += "    print(at, flush=True)\n    for name in names: getattr(re, way)(pattern, name)"

MAX_SECONDS = 10
"""Limit for matching all patterns of a config with the names of all modules."""


def check_patterns(config: Config, modules: Iterable[str], where: str) -> None:
    """Refuse patterns with which PEFT would fail, or search for hours.

    They are matched in a process of their own, since nothing else can stop a search.

    Args:
        config: contents of ``adapter_config.json``.
        modules: names of all modules of the model.
        where: that file, for messages.

    Raises:
        InputError: the message has the pattern.
    """
    names, work, texts = [*modules], [], []
    for key, value in config.items():
        if key.endswith("_pattern"):
            inside = r".*\.{}\.(\d+)\." if key == "layers_pattern" else WHOLE_NAME
            patterns = [value] if isinstance(value, str) else [*(value or ())]
            work += [(inside.format(pattern), "match", names) for pattern in patterns]
        elif key in ("target_modules", "exclude_modules") and isinstance(value, str):
            patterns = [value]
            work.append((value, "fullmatch", names))
        else:
            continue
        texts += [f"{key} in {where} has the pattern {pattern!r}, " for pattern in patterns]
    for what, (pattern, *_) in zip(texts, work, strict=True):
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(f"{what}{error}; correct it") from None
    try:
        if work:
            command = [sys.executable, "-I", "-S", "-c", BY_MATCHING]
            text = json.dumps(work).encode()
            subprocess.run(command, input=text, timeout=MAX_SECONDS, stdout=PIPE, check=True)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{texts[int((error.output or b'0').split()[-1])]}which takes too long to compare with "
            "the names of modules; write it without a repetition inside of another"
        ) from None


def scaling(config: Config, module: str, rank: int) -> float:
    """LoRA's factor of B·A in a module.

    Args:
        config: contents of ``adapter_config.json``.
        module: name of the module.
        rank: rank of its factors.
    """
    own = own_alpha(config, module)
    alpha = float(config.get("lora_alpha", DEFAULT) if own is None else own)
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def own_alpha(config: Config, module: str) -> Any:
    """The alpha of the first pattern that matches a module, as in PEFT; None if none does."""
    settings = (config.get("alpha_pattern") or {}).items()
    return next(
        (value for pattern, value in settings if re.match(WHOLE_NAME.format(pattern), module)), None
    )


class AdapterFolder:
    """An adapter as PEFT saves it.

    Attributes:
        opened: the folder.
        file: the file with its tensors.
        files: all files that growkit reads.
        tensors: its tensors.
        config: the contents of ``adapter_config.json``.
        method: its method.

    Raises:
        InputError: there is no adapter, it is damaged, or growkit does not grow its method.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise InputError(f"{path} does not exist; give the folder of a PEFT adapter")
        self.opened = Folder(path)
        if not self.opened.has(ADAPTER):
            raise InputError(f"{path} has no {ADAPTER}; give the folder of a PEFT adapter")
        self.config: Config = self.opened.json(ADAPTER)
        self.method = method_of(self.config, str(path / ADAPTER))
        name = next((file for file in ADAPTER_WEIGHTS if self.opened.find(file)), None)
        if name is None:
            raise InputError(f"{path} has no {ADAPTER_WEIGHTS[0]}; copy the adapter again")
        self.file = open_weights(self.opened, name)
        self.files = [self.opened.path / ADAPTER, *self.file.paths]
        self.tensors: Weights = self.file
