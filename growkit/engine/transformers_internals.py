"""Private names of transformers, and changes to it: each for want of a public one, and only here.

A newer transformers may rename them. ``transformers_versions``, next to the DIFF Transformer's
files, has what these need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from growkit.base.lazy import Tensor, torch
from growkit.base.torch_internals import registered_parameters


def causal_class(config: Any) -> Any:
    """The class of causal language models of a parsed config; None if there is none."""
    from transformers import AutoModelForCausalLM

    known: Any = AutoModelForCausalLM._model_mapping
    return known.get(type(config), None)


def own_dtypes(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """The dtypes of parameters that a class keeps in another one, by patterns of their names."""
    dtypes: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return dtypes


def attention_of(model: Any) -> str:
    """The implementation of attention that a model runs with."""
    return str(model.config._attn_implementation)


def one_expert_at_a_time(model: Any) -> None:
    """Let a model multiply with one expert at a time, if it has experts."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def ignored_names(model: Any) -> list[str]:
    """Patterns of the names of stored tensors that a class does not read."""
    return [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]


def generation_defaults() -> dict[str, Any]:
    """The settings of generation that stand where a folder has none."""
    from transformers import GenerationConfig

    return dict(GenerationConfig._get_default_generation_params())


@contextmanager
def offline() -> Iterator[None]:
    """Let no network be used in this context."""
    from unittest.mock import patch  # takes 14 ms

    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


@contextmanager
def uninitialised(device: str | None = None) -> Iterator[None]:
    """Build modules inside this context with buffers, but with uninitialised parameters.

    Parameters are marked as loaded, so that transformers does not initialise them. Buffers that no
    file holds, such as the frequencies of rotary embeddings, are computed.

    Args:
        device: device of the parameters; None for the default device.
    """
    from transformers.initialization import guard_torch_init_functions

    def as_read(parameter: torch.nn.Parameter) -> Any:
        if device is not None:
            parameter = torch.nn.Parameter(parameter.to(device))
        marked: Any = parameter
        marked._is_hf_initialized = True
        return marked

    with guard_torch_init_functions(), registered_parameters(as_read):
        yield


class _StoppedError(Exception):
    """Stops ``from_pretrained`` before it reads weights."""


class Trace(NamedTuple):
    """What transformers would read.

    Attributes:
        model: the model, without weights.
        files: its weight files.
        missing: the names of missing tensors.
    """

    model: Any
    files: list[str]
    missing: set[str]


def trace_loading(
    load: Callable[[], Any],
    tensors: Callable[[], dict[str, Tensor]],
    recording: Callable[[Any], AbstractContextManager[None]],
    refuse_shards: Callable[..., NoReturn],
) -> Trace:
    """Load a model, but with these tensors in place of those in its files.

    Args:
        load: calls ``from_pretrained``, which is stopped when it has found its files.
        tensors: makes the tensors, on the meta device.
        recording: the context in which they are loaded into the model.
        refuse_shards: called if the files are a distributed checkpoint.
    """
    from unittest.mock import patch

    from transformers import PreTrainedModel

    load_tensors = PreTrainedModel._load_pretrained_model
    traces: list[Trace] = []

    def record(model: Any, state: Any, files: Any, options: Any, *rest: Any) -> NoReturn:
        nowhere = dataclasses.replace(options, device_map={"": "meta"})
        with recording(model):
            info, _ = load_tensors(model, tensors(), None, nowhere)
        model._adjust_missing_and_unexpected_keys(info)
        traces.append(Trace(model, [str(file) for file in files or ()], set(info.missing_keys)))
        raise _StoppedError

    distributed = "_load_and_finalize_distributed_pretrained_model"
    with (
        patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(record)),
        patch.object(PreTrainedModel, distributed, refuse_shards, create=True),
        suppress(_StoppedError),
    ):
        load()
    return traces[0]


@contextmanager
def watched_conversions(
    tensor_added: Callable[[Any, str, str, str], None],
    converted: Callable[[Any, Mapping[str, Any]], None],
    skipped: Callable[[Any], bool],
) -> Iterator[None]:
    """Watch the conversions that transformers does while it loads.

    Args:
        tensor_added: called with a transform, the name of its result, and the name and the pattern
            of a tensor that it takes.
        converted: called with a transform and its results.
        skipped: whether a transform is not to run.
    """
    from unittest.mock import patch

    from transformers.core_model_loading import WeightConverter, WeightTransform

    add, convert = WeightTransform.add_tensor, WeightConverter.convert

    def add_watched(transform: Any, name: str, tensor: str, pattern: str, value: Any) -> Any:
        tensor_added(transform, name, tensor, pattern)
        return add(transform, name, tensor, pattern, value)

    def convert_watched(transform: Any, *args: Any, **kwargs: Any) -> Any:
        if skipped(transform):
            return {}
        results = convert(transform, *args, **kwargs)
        converted(transform, results)
        return results

    with (
        patch.object(WeightTransform, "add_tensor", add_watched),
        patch.object(WeightConverter, "convert", convert_watched),
    ):
        yield
