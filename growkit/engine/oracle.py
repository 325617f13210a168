"""The oracle: the real transformers class, loaded from the written files.

Layouts of differential attention for which transformers has no class run as what they are read
into, ``growkit.modeling``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import CRITICAL
from pathlib import Path
from typing import Any
from unittest.mock import patch

from growkit.base.errors import InputError, foreign
from growkit.base.lazy import torch
from growkit.base.tensors import Config, Weights
from growkit.checkpoint.publishing import temporary
from growkit.checkpoint.reading import Checkpoint
from growkit.families.family import families, family_of
from growkit.modeling import register
from growkit.planning.layouts import as_diff_transformer, read_layout
from growkit.planning.plan import Planned

KERNELS = ("attn_implementation", "experts_implementation")
"""How keys end that choose the code of attention or of experts."""

BUILT_IN = ("batched_mm", "eager", "flex_attention", "grouped_mm", "sdpa")
"""What transformers computes with torch alone."""

DEPTH = 64
"""How deep configs are nested, at most."""

REFUSED = {
    "quantization_config": "the model is quantised; dequantise it first",
    "fusion_config": "it replaces modules of the class while it is built; remove the key",
    "configuration_files": "another file may take the place of config.json; remove the key",
    "kernel_config": "it loads code from the hub; remove the key",
    "use_kernels": "it loads code from the hub; remove the key",
}
"""Keys that have transformers build another model than the class's own, and what to do."""


def load_model(
    stored: Path | Checkpoint, dtype: torch.dtype, device: torch.device, attention: str | None
) -> torch.nn.Module:
    """The model in a folder, ready to run.

    Args:
        stored: a model folder, or the checkpoint in one.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.

    Raises:
        InputError: transformers does not know the model, or the files do not fit the class.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    from growkit.modeling.modeling_diff_transformer import DiffTransformerForCausalLM

    checkpoint = stored if isinstance(stored, Checkpoint) else Checkpoint(stored)
    folder, weights = checkpoint.folder, readable(checkpoint)
    as_stored = weights is checkpoint and checkpoint.stands_alone
    with (
        quiet(),
        foreign(f"transformers cannot load {folder}", "correct its config.json or its weights"),
    ):
        cls: Any = AutoModelForCausalLM
        options: dict[str, Any] = {}
        if not as_stored:
            # Files hold float32 as float32, even when all arithmetic is done in float64.
            with torch._C.DisableTorchFunction():
                options["state_dict"] = {name: weights.read(name) for name in weights.tensors}
            options["config"] = parsed(weights.config)
            cls = cls._model_mapping.get(type(options["config"]), DiffTransformerForCausalLM)
        model, loading = cls.from_pretrained(
            folder if as_stored else None,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=experts_implementation(dtype),
            local_files_only=True,
            trust_remote_code=False,
            generation_config=GenerationConfig(),  # its settings are no part of the function
            ignore_mismatched_sizes=True,  # reported below, with the tensor's name
            output_loading_info=True,
            **options,
        )
    # Missing buffers are made by the class, always the same.
    missing = {*loading["missing_keys"]} - {name for name, _ in model.named_buffers()}
    mismatched = {str(name) for name, *_ in loading["mismatched_keys"]}
    for problem, keys in (("missing keys", missing), ("mismatched keys", mismatched)):
        if keys:
            raise random_weights(model, problem, str(folder), min(keys))
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(
                f"tensor {name} of {folder} holds NaN or infinity in {dtype}; "
                "a model like that cannot be proved"
            )
    fit_experts(model)
    model.eval().to(device)
    assert isinstance(model, torch.nn.Module)
    return checkpoint.as_read(model)


def random_weights(model: Any, problem: str, where: str, name: str) -> InputError:
    """The error of a model that would run with random weights in a parameter."""
    return InputError(
        f"{type(model).__name__} reports {problem} in {where}: {name}; the model would run with "
        "random weights there, correct config.json or the weights"
    )


def check_accepted(config: Config, name: str) -> None:
    """Build the model of a config without weights, to see whether transformers takes it.

    Args:
        config: contents of a ``config.json``.
        name: what to call it in the message.

    Raises:
        InputError: transformers does not take it.
    """
    if lacks_class(config):
        config = as_diff_transformer(config, name)
    with foreign(f"transformers does not accept {name}", "correct that value"):
        model_without_numbers(config, name)


def model_without_numbers(config: Config, name: str = "config.json") -> Any:
    """The model of a config, to look at its shapes.

    Raises:
        Exception: whatever its class raises.
    """
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"), uninitialised():
        return AutoModelForCausalLM.from_config(parsed(config, name), trust_remote_code=False)


def longest_context(config: Config) -> Any:
    """``max_position_embeddings``, as the class of a model finds it; None if it has none."""
    if not lacks_class(config):
        with quiet(), suppress(InputError), foreign("the config is not understood", "correct it"):
            text = parsed(config).get_text_config(decoder=True)
            return getattr(text, "max_position_embeddings", None)
    return config.get("max_position_embeddings")


def lacks_class(config: Config) -> bool:
    """Whether transformers has no class for a model, but growkit has."""
    from transformers import CONFIG_MAPPING

    register()
    known = [kind for family in families().values() if family.form for kind in family.model_types]
    return config.get("model_type") in known and config["model_type"] not in CONFIG_MAPPING


def readable(weights: Weights) -> Weights:
    """A checkpoint, as a DIFF Transformer where transformers has no class for it."""
    return Planned(weights, read_layout(weights)) if lacks_class(weights.config) else weights


def parsed(config: Config, name: str = "config.json") -> Any:
    """What transformers makes of a config, as if it were in a folder.

    Raises:
        InputError: it names code or kernels.
    """
    from transformers import AutoConfig

    plain = inert({key: value for key, value in config.items() if key != "auto_map"}, name)
    with temporary("config") as scratch:
        (scratch / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        return AutoConfig.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)


def inert(config: Any, where: str, depth: int = 0) -> Any:
    """A config that names no code: what torch has serves as kernels, and anything else is refused.

    Args:
        config: contents of a ``config.json``, or a part of it.
        where: what to call it.
        depth: of the part.

    Raises:
        InputError: names the key.
    """
    if depth > DEPTH:
        raise InputError(f"{where} is nested more than {DEPTH} times; copy it again")
    if isinstance(config, list):
        return [inert(each, where, depth + 1) for each in config]
    if not isinstance(config, dict):
        return config
    kept = {}
    for key, value in config.items():
        if key in REFUSED and value not in (None, False, [], {}):
            raise InputError(f"{where} has {key}: {REFUSED[key]}")
        if not str(key).endswith(KERNELS):
            kept[key] = inert(value, where, depth + 1)
            continue
        for named in value.values() if isinstance(value, dict) else [value]:
            # Flash attention is replaced by what torch has: the proof needs no other package.
            flash = isinstance(named, str) and re.fullmatch(r"flash_attention_[^/]*", named)
            if named is not None and not flash and named not in BUILT_IN:
                raise InputError(
                    f"{where} has {key} {named!r}, which is code that growkit does not load; "
                    f"choose one of {', '.join(BUILT_IN)}, or remove the key"
                )
        if value in BUILT_IN:
            kept[key] = value
    return kept


def experts_implementation(dtype: torch.dtype) -> str | None:
    """Transformers' way to multiply with experts; None for the class's own choice."""
    return "eager" if dtype == torch.float64 else None  # fast products of groups have no float64


def fit_experts(model: Any) -> None:
    """Have a model multiply with one expert at a time where all together cannot be.

    Fast products of groups need rows of whole multiples of 16 bytes.
    """
    stacked = (each for each in model.parameters() if each.dim() == 3)
    odd = any(each.shape[-1] * each.element_size() % 16 for each in stacked)
    if odd and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, logs, warnings and network: errors say what matters."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with patch.object(constants, "HF_HUB_OFFLINE", True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def uninitialised(device: str | None = None) -> Iterator[None]:
    """Modules made here have buffers as ever, but parameters with no numbers in them yet.

    transformers takes a parameter for one whose weights were read, and does not initialise it.
    Buffers that no file holds (the frequencies of rotary embeddings, say) are computed.

    Args:
        device: where parameters are put; None for where they are made.
    """
    from torch import nn
    from transformers.initialization import guard_torch_init_functions

    register = nn.Module.register_parameter

    def register_as_read(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            if device is not None:
                parameter = nn.Parameter(parameter.to(device))
            as_read: Any = parameter
            as_read._is_hf_initialized = True
        register(module, name, parameter)

    with (
        guard_torch_init_functions(),
        patch.object(nn.Module, "register_parameter", register_as_read),
    ):
        yield


OLDER_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Keys that transformers reads into ``rope_parameters``, if that key is not there."""

PROVENANCE_KEYS = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "auto_map"),
        *("_attn_implementation", "_attn_implementation_autoset", "transformers_weights"),
        "architectures",
    }
)
"""Keys that say how a file came about, or that are compared elsewhere."""


def resolved(config: Config) -> Config | None:
    """A config with the defaults of its class; None where transformers knows none, or refuses it.

    Null is a value: a window of null is none, and one that is left out has the default length.
    """
    register()
    try:
        with quiet(), foreign("the config is not understood", "correct it"):
            complete: Config = parsed(config).to_dict()
    except InputError:
        return None
    return complete


def resolved_as_loaded(config: Config, where: str) -> Config | None:
    """Like ``resolved``; a layout without a class in transformers runs as a DIFF Transformer."""
    return resolved(as_diff_transformer(config, where) if lacks_class(config) else config)


def write_defaults_out(source: Config, planned: Config, where: str) -> Config:
    """The planned config of another class, with what the source's class assumes written out.

    A key that the source's config leaves out has the default of the source's class. The target's
    class may have another default for it.

    Args:
        source: the config of the source, as its file has it.
        planned: the config of what is made of it.
        where: the source, for messages.
    """
    if source.get("model_type") == planned.get("model_type"):
        return planned
    was, now = (resolved_as_loaded(each, where) for each in (source, planned))
    if was is None or now is None:
        return planned
    sizes = family_of(source, where).size_keys | family_of(planned, where).size_keys
    missing = {
        key: was[key]
        for key in (was.keys() & now.keys()) - source.keys() - sizes - PROVENANCE_KEYS - {"dtype"}
        if was[key] != now[key]
    }
    dropped = OLDER_ROPE_KEYS if "rope_parameters" in missing else ()
    return {key: value for key, value in planned.items() if key not in dropped} | missing
