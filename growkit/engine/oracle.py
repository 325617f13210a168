"""The oracle: the real transformers class, loaded from the written files.

Layouts of differential attention for which transformers has no class run as what they are read
into, ``growkit.modeling``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.scratch import temporary
from growkit.checkpoint.tensors import TORCH_NAMES, Config, TensorInfo, Weights, cut
from growkit.engine.inert import check_config_runs_nothing, without_kernels
from growkit.errors import InputError, foreign
from growkit.families.family import families
from growkit.modeling import register
from growkit.planning.layouts import as_diff_transformer, read_layout
from growkit.planning.plan import Planned

CPU = torch.device("cpu")


def load(
    folder: Path, dtype: torch.dtype, device: torch.device, attention: str | None
) -> nn.Module:
    """The model in a folder, ready to run.

    Args:
        folder: a model folder.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.

    Raises:
        InputError: transformers does not know the model, or the files do not fit the class.
    """
    from transformers import GenerationConfig

    checkpoint = Checkpoint(folder)
    weights = readable(checkpoint)
    with (
        quiet(),
        foreign(f"transformers cannot load {folder}", "correct its config.json or its weights"),
    ):
        model, loading = _from_pretrained(
            folder,
            None if weights is checkpoint else weights,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=_experts(dtype),
            local_files_only=True,
            trust_remote_code=False,
            generation_config=GenerationConfig(),  # its settings are no part of the function
            ignore_mismatched_sizes=True,  # reported below, with the tensor's name
            output_loading_info=True,
        )
    buffers = {name for name, _ in model.named_buffers()}
    for problem in ("missing_keys", "mismatched_keys"):
        keys = {str(key[0] if isinstance(key, tuple) else key) for key in loading[problem]}
        if problem == "missing_keys":
            keys -= buffers  # the class makes them, always the same
        if keys:
            name = min(keys)
            raise InputError(
                f"{type(model).__name__} reports {problem.replace('_', ' ')} in {folder}: {name}; "
                "the model would run with random weights there, correct config.json or the weights"
            )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(
                f"tensor {name} of {folder} holds NaN or infinity in {dtype}; "
                "a model like that cannot be proved"
            )
    model.eval().to(device)
    assert isinstance(model, nn.Module)
    return model


class Loaded:
    """A checkpoint as transformers loads it: whole, under the names that the class has.

    For classes whose parameters have other names than the tensors in their files, or are made of
    several of them.

    Raises:
        InputError: the files do not fit the class.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._folder = checkpoint.folder
        # As stored, whatever arithmetic is to be done with it.
        with torch._C.DisableTorchFunction():
            model = load(self._folder, _widest(checkpoint.tensors), CPU, None)
        buffers = persistent_buffers(model)
        self._tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        names = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
        self.tensors = {}
        for name, tensor in self._tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors[name] = TensorInfo(tuple(tensor.shape), names.get(dtype, dtype))

    def where(self, name: str | None = None) -> str:
        """The folder."""
        return str(self._folder)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor, whole."""
        yield self.read(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """A tensor, or some rows of it, or of these some columns."""
        return cut(self._tensors[name].detach(), rows, columns)

    def by_rows(self, name: str) -> bool:
        """All of it is in memory already."""
        return True


def empty_model(
    weights: Weights, dtype: torch.dtype, attention: str | None
) -> tuple[Any, Weights, Callable[[str], str]]:
    """The model of a checkpoint without its weights; buffers are what the class makes of them.

    Args:
        weights: a checkpoint, on disk or planned.
        dtype: of the parameters.
        attention: transformers' attention implementation; None for the class's own choice.

    Returns:
        The model; its weights under the names that the class has for them; and the name among
        these of a parameter, which another name if the two are tied.

    Raises:
        InputError: transformers does not know the model, or a tensor is missing or does not fit.
    """
    from transformers import AutoModelForCausalLM

    weights = readable(weights)
    with (
        quiet(),
        _without_parameters(),
        foreign(
            f"transformers cannot build the model of {weights.where()}", "correct its config.json"
        ),
    ):
        config = parsed(weights.config)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise InputError(
                f"{weights.where()} holds a model of type {config.model_type}, which "
                "transformers has no causal language model for; only these can be compared"
            )
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=_experts(dtype),
            trust_remote_code=False,
        )
    model.eval()
    tied = getattr(model, "all_tied_weights_keys", None) or {}

    def stored(name: str) -> str:
        return name if name in weights.tensors or name not in tied else str(tied[name])

    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
    wanted = {stored(name) for name in (*parameters, *buffers)}
    if isinstance(weights, Checkpoint) and wanted - weights.tensors.keys():
        known = wanted.union(tied, (name for name, _ in model.named_buffers()))
        if weights.tensors.keys() - known:  # nothing is missing, perhaps, but has another name
            weights = Loaded(weights)
    for name, tensor in {**parameters, **buffers}.items():
        found = weights.tensors.get(stored(name))
        if found is None and name in buffers:
            continue  # the loader as well leaves it as the class makes it
        if found is None or found.shape != tuple(tensor.shape):
            what = "missing keys" if found is None else "mismatched keys"
            raise InputError(
                f"{type(model).__name__} reports {what} in {weights.where()}: {name}; "
                "the model would run with random weights there, correct config.json or the weights"
            )
    return model, weights, stored


def check_config(config: Config, name: str) -> None:
    """Build the model of a config without weights, to see whether transformers takes it.

    Args:
        config: contents of a ``config.json``.
        name: what to call it in the message.

    Raises:
        InputError: transformers does not take it.
    """
    from transformers import AutoModelForCausalLM

    if lacks_class(config):
        config = as_diff_transformer(config, name)
    with (
        quiet(),
        torch.device("meta"),
        foreign(f"transformers does not accept {name}", "correct that value"),
    ):
        AutoModelForCausalLM.from_config(parsed(config, name), trust_remote_code=False)


def longest_context(config: Config) -> Any:
    """``max_position_embeddings``, as the class of a model finds it; None if it has none."""
    if not lacks_class(config):
        with quiet(), suppress(InputError), foreign("the config is not understood", "correct it"):
            text = parsed(config).get_text_config(decoder=True)
            return getattr(text, "max_position_embeddings", None)
    return config.get("max_position_embeddings")


def gradients_as_stored(checkpoint: Checkpoint) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    """From parameters of the model that ``load`` makes of a checkpoint to tensors in its files.

    Returns:
        A function that takes the name of a parameter and a tensor of its shape, and gives the name
        and the arrangement of the tensor that is stored.
    """
    if not lacks_class(checkpoint.config):
        return lambda name, gradient: (name, gradient)
    rules = {rule.target: rule for rule in read_layout(checkpoint).rules}

    def stored(name: str, gradient: Tensor) -> tuple[str, Tensor]:
        (source,) = rules[name].sources
        rows = slice(0, checkpoint.tensors[source].shape[0])
        arranged = rules[name].transform.undo(gradient.__getitem__, rows)
        assert arranged is not None
        return source, arranged

    return stored


def lacks_class(config: Config) -> bool:
    """Whether transformers has no class for a model, but growkit has."""
    from transformers import CONFIG_MAPPING

    register()
    known = [kind for family in families().values() if family.form for kind in family.model_types]
    return config.get("model_type") in known and config["model_type"] not in CONFIG_MAPPING


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Modules made here have buffers, but parameters without data."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        empty = None if parameter is None else nn.Parameter(parameter.to("meta"))
        register(module, name, empty)

    with patch.object(nn.Module, "register_parameter", register_empty):
        yield


def readable(weights: Weights) -> Weights:
    """A checkpoint, as a DIFF Transformer where transformers has no class for it."""
    return Planned(weights, read_layout(weights)) if lacks_class(weights.config) else weights


def _from_pretrained(folder: Path, weights: Weights | None, **options: Any) -> Any:
    if weights is None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, **options)
    from growkit.modeling.modeling_diff_transformer import DiffTransformerForCausalLM

    # Files hold float32 as float32, whatever arithmetic is to be done with it.
    with torch._C.DisableTorchFunction():
        state = {name: weights.read(name) for name in weights.tensors}
    return DiffTransformerForCausalLM.from_pretrained(
        None, config=parsed(weights.config), state_dict=state, **options
    )


def parsed(config: Config, name: str = "config.json") -> Any:
    """What transformers makes of a config, as if it lay in a folder.

    Raises:
        InputError: it names code or kernels.
    """
    from transformers import AutoConfig

    check_config_runs_nothing(config, name)
    plain = without_kernels({key: value for key, value in config.items() if key != "auto_map"})
    with temporary("config") as scratch:
        (scratch / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        return AutoConfig.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)


def _experts(dtype: torch.dtype) -> str | None:
    """Transformers' way to multiply with experts; None for the class's own choice."""
    return "eager" if dtype == torch.float64 else None  # fast products of groups have no float64


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model stores beside its parameters, by name."""
    stored, buffers = model.state_dict(keep_vars=True), dict(model.named_buffers())
    return {name: tensor for name, tensor in stored.items() if name in buffers}


def _widest(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The narrowest dtype in which no tensor of these loses anything."""
    found = {info.dtype for info in tensors.values()} & TORCH_NAMES.keys()
    dtypes: list[torch.dtype] = [getattr(torch, TORCH_NAMES[name]) for name in found]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def blocks(model: Any, where: str) -> list[tuple[str, nn.Module]]:
    """Name and module of the embedding, of every decoder layer, and of the output head.

    Args:
        model: a causal language model.
        where: what to call it in the message.

    Raises:
        InputError: it has no such parts.
    """
    named = dict(model.named_modules())
    config = model.config.get_text_config(decoder=True)
    # Some count encoder layers as ``num_hidden_layers``.
    keys = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    count = next((getattr(config, key) for key in keys if getattr(config, key, None)), 0)
    stacks = [
        name
        for name, module in named.items()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    name_of = {id(module): name for name, module in named.items()}
    if not count or not stacks or id(embedding) not in name_of or id(head) not in name_of:
        raise InputError(
            f"{type(model).__name__} of {where} is no stack of layers between an embedding and a "
            "head; such models cannot be proved"
        )
    layers = min(stacks, key=lambda name: name.count("."))  # what else it has lies deeper
    return [
        (name_of[id(embedding)], embedding),
        *((f"{layers}.{index}", named[f"{layers}.{index}"]) for index in range(count)),
        (name_of[id(head)], head),
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, all warnings and network: errors say what matters."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with patch.object(constants, "HF_HUB_OFFLINE", True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
