"""The transformers class of a model: its config, as the class resolves it, and the model itself.

Models without a class in transformers run as one of growkit's own (``growkit.planning.own_class``).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import lru_cache
from logging import CRITICAL
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, foreign
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.transformers_internals import (
    causal_class,
    offline,
    one_expert_at_a_time,
    uninitialised,
)
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import in_temporary
from growkit.model.model import Model
from growkit.planning.own_class import config_as_loaded, register_own_classes, runnable, substitute

KERNELS = ("attn_implementation", "experts_implementation")
"""Suffixes of config keys that select an implementation of attention or experts."""

BUILT_IN = ("batched_mm", "eager", "flex_attention", "grouped_mm", "sdpa")
"""Implementations of transformers that need only torch."""

DEPTH = 64
"""Limit for the nesting depth of configs."""

REFUSED = {
    "quantization_config": "the model is quantised; dequantise it first",
    "fusion_config": "it replaces modules of the class while it is built; remove the key",
    "configuration_files": "another file may take the place of config.json; remove the key",
    "kernel_config": "it loads code from the hub; remove the key",
    "use_kernels": "it loads code from the hub; remove the key",
}
"""Config keys that replace the class's own model with another: the reason, and the remedy."""


def load_model(
    stored: Path | Model, dtype: torch.dtype, device: torch.device, attention: str | None
) -> torch.nn.Module:
    """Load a model, ready to run.

    Args:
        stored: a model folder, the checkpoint in one, or one that is planned.
        dtype: dtype of the weights after casting.
        device: device that the model runs on.
        attention: transformers' attention implementation; None for the class's own choice.

    Raises:
        InputError: transformers does not know the model, or the files do not fit the class.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    checkpoint = stored if isinstance(stored, Model) else Checkpoint(stored)
    folder, weights = checkpoint.where(), runnable(checkpoint)
    as_stored = (
        weights is checkpoint and isinstance(checkpoint, Checkpoint) and checkpoint.stands_alone
    )
    with (
        quiet(),
        foreign(f"transformers cannot load {folder}", "correct its config.json or its weights"),
    ):
        cls: Any = AutoModelForCausalLM
        options: dict[str, Any] = {}
        if not as_stored:
            # Files hold float32 as float32, even when all arithmetic is done in float64.
            with stored_dtypes():
                options["state_dict"] = {name: weights.read(name) for name in weights.tensors}
            options["config"] = parsed(weights.config)
            cls = causal_class(options["config"])
        model, loading = cls.from_pretrained(
            folder if as_stored else None,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            generation_config=GenerationConfig(),  # generation settings do not affect logits
            ignore_mismatched_sizes=True,  # reported below, with the tensor's name
            output_loading_info=True,
            **options,
        )
    # The class computes missing buffers, always with the same values.
    missing = {*loading["missing_keys"]} - {name for name, _ in model.named_buffers()}
    mismatched = {str(name) for name, *_ in loading["mismatched_keys"]}
    for problem, keys in (("missing keys", missing), ("mismatched keys", mismatched)):
        if keys:
            raise unread_weights(model, problem, folder, min(keys))
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(
                f"tensor {name} of {folder} holds NaN or infinity in {dtype}; "
                "such a model cannot be proved"
            )
    fit_experts(model)
    model.eval().to(device)
    assert isinstance(model, torch.nn.Module)
    return checkpoint.as_read(model) if isinstance(checkpoint, Checkpoint) else model


def class_loss(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss as the class returns it, with the terms that its config adds.

    Args:
        model: the model.
        ids: token ids, [tokens], on the model's device.

    Returns:
        The loss in nats per prediction, and the logits, [tokens, vocabulary].

    Raises:
        InputError: the class computes no loss.
    """
    with foreign(
        f"{type(model).__name__} computes no loss", "its class cannot be trained as it is"
    ):
        output = model(ids[None], labels=ids[None], use_cache=False)
        return output.loss.reshape(()), output.logits[0]


def unread_weights(
    model: Any, problem: str, where: str, name: str, stored: Collection[str] = ()
) -> InputError:
    """The error for a model that would run with a randomly initialised parameter.

    Args:
        model: the model.
        problem: what transformers reports.
        where: the files.
        name: name of the parameter.
        stored: names of the tensors in the files, if they are known.
    """
    end = name.removeprefix("model.")
    other = next((of for of in stored if of != name and of.endswith(f".{end}")), "")
    there = f" (there is {other}, which the class does not read)" if other else ""
    if other.endswith(f".{name}"):
        prefix = other.removesuffix(name)
        there = f" (there is {other}; if others also begin with {prefix}, save them without it)"
    return InputError(
        f"{type(model).__name__} reports {problem} in {where}: {name}{there}; the model would run "
        "with random weights there, correct config.json or the weights"
    )


def check_accepted(config: Config, name: str) -> None:
    """Check that transformers accepts a config, by building its model without weights.

    Args:
        config: contents of a ``config.json``.
        name: name of the config in messages.

    Raises:
        InputError: transformers does not accept it.
    """
    config = config_as_loaded(config, name)
    with foreign(f"transformers does not accept {name}", "correct that value"):
        model_without_numbers(config, name)


def model_without_numbers(config: Config, name: str = "config.json") -> Any:
    """Build the model of a config on the meta device, for its shapes.

    Raises:
        Exception: any exception of the class.
    """
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"), uninitialised():
        return AutoModelForCausalLM.from_config(parsed(config, name), trust_remote_code=False)


def aliases(config: Config) -> Mapping[str, str]:
    """Other names of keys that a config's class reads, with its own names."""
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


def longest_context(config: Config) -> Any:
    """``max_position_embeddings`` as the model's class resolves it; None if it has none."""
    if not substitute(config):
        with quiet(), suppress(InputError), foreign("the config is not understood", "correct it"):
            text = parsed(config).get_text_config(decoder=True)
            return getattr(text, "max_position_embeddings", None)
    common = "max_position_embeddings"
    return config.get(aliases(config).get(common, common), config.get(common))


def tokens_of(config: Config) -> int:
    """Number of tokens that have logits; Inkling has none for those that only fill its table."""
    filled: int = config["vocab_size"]
    return min(filled, config.get("unpadded_vocab_size") or filled)


def require_class(config: Config, where: str, so: str) -> None:
    """Refuse a model for which transformers has no class; ``so`` ends the sentence.

    Raises:
        InputError: transformers has no class for the model.
    """
    if substitute(config):
        kind = config["model_type"]
        raise InputError(f"transformers has no class for the {kind} model in {where}, so {so}")


def parsed(config: Config, name: str = "config.json") -> Any:
    """Parse a config with transformers, as if it were in a folder.

    Raises:
        InputError: the config names code or kernels.
    """
    from transformers import CONFIG_MAPPING

    plain = inert({key: value for key, value in config.items() if key != "auto_map"}, name)
    kind = plain.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    config_class: Any = CONFIG_MAPPING[kind] if known else None
    return deepcopy(parsed_text(json.dumps(plain), config_class))


@lru_cache(1 << 8)  # a proof asks for the same few configs dozens of times
def parsed_text(text: str, config_class: Any) -> Any:
    """The parsed config; its class is an argument because a user's code may register another."""
    from transformers import AutoConfig

    def parse(scratch: Path) -> Any:
        (scratch / "config.json").write_text(text, encoding="utf-8")
        return AutoConfig.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)

    return in_temporary("config", parse)


def inert(config: Any, where: str, depth: int = 0) -> Any:
    """Copy a config that names no code, with only torch's own kernels; refuse any other.

    Args:
        config: contents of a ``config.json``, or a part of it.
        where: name of the config in messages.
        depth: nesting depth of the part.

    Raises:
        InputError: the config names code or another model; the message names the key.
    """
    if depth > DEPTH:
        raise InputError(f"{where} is nested more than {DEPTH} times; copy it again")
    if isinstance(config, list):
        return [inert(entry, where, depth + 1) for entry in config]
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
            # torch's own kernels replace flash attention, so the proof needs no other package.
            flash = isinstance(named, str) and re.fullmatch(r"flash_attention_[^/]*", named)
            if named is not None and not flash and named not in BUILT_IN:
                raise InputError(
                    f"{where} has {key} {named!r}, which is code that growkit does not load; "
                    f"choose one of {', '.join(BUILT_IN)}, or remove the key"
                )
        if value in BUILT_IN:
            kept[key] = value
    return kept


def fit_experts(model: Any) -> None:
    """Make a model multiply with one expert at a time if grouped kernels cannot run.

    Grouped kernels have no float64, and need rows whose size is a multiple of 16 bytes, both of
    matrices and of what these read: some classes store matrices transposed. Of a sharded matrix, a
    process multiplies with its own part.
    """
    matrices = (parameter for parameter in model.parameters() if parameter.dim() == 3)
    stacked = (matrix.to_local() if hasattr(matrix, "to_local") else matrix for matrix in matrices)
    odd = any(size * matrix.element_size() % 16 for matrix in stacked for size in matrix.shape[1:])
    if odd or model.dtype == torch.float64:
        one_expert_at_a_time(model)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off transformers' progress bars, logs, warnings and network access."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if verbosity != CRITICAL:  # each change empties the caches of all loggers
        logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with offline(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if verbosity != CRITICAL:
            logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


OLDER_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Keys that transformers reads into ``rope_parameters`` if that key is absent."""

PROVENANCE_KEYS = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "auto_map"),
        *("_attn_implementation", "_attn_implementation_autoset", "transformers_weights"),
        "architectures",
    }
)
"""Keys that record how a file was made, or that are compared elsewhere."""


def resolved(config: Config) -> Config | None:
    """Complete a config with its class's defaults; None if transformers has no class or refuses it.

    Null is a value: a window of null is no window, while an absent one has the default length.
    """
    register_own_classes()
    with quiet(), suppress(InputError), foreign("the config is not understood", "correct it"):
        complete: Config = parsed(config).to_dict()
        return complete
    return None


def write_defaults_out(source: Model, target: Model) -> Config:
    """Write the defaults of the source's class into the planned config of another class.

    A key that is absent from the source's config has the default of the source's class. The
    target's class may have another default for it. What the plan sets stays, and for models that
    run as growkit's own class, plans set every key.

    Args:
        source: the source.
        target: the planned target.
    """
    before, planned = source.config, target.config
    same_class = before.get("model_type") == planned.get("model_type")
    if same_class or substitute(before) or substitute(planned):
        return planned
    was, now = resolved(before), resolved(planned)
    if was is None or now is None:
        return planned
    fixed = before.keys() | planned.keys() | PROVENANCE_KEYS | {"dtype"}
    if any(before.get(key) != planned.get(key) for key in OLDER_ROPE_KEYS):
        fixed |= {"rope_parameters"}
    sizes = source.family.size_keys | target.family.size_keys
    missing = {
        key: was[key] for key in (was.keys() & now.keys()) - fixed - sizes if was[key] != now[key]
    }
    dropped = OLDER_ROPE_KEYS if "rope_parameters" in missing else ()
    return {key: value for key, value in planned.items() if key not in dropped} | missing
