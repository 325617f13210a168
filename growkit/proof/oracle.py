"""The oracle: the real transformers class, loaded from the written files.

Layouts of differential attention for which transformers has no class run as what they are read
into, ``growkit.modeling``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from growkit.checkpoint import TORCH_NAMES, Config, TensorInfo, Weights, main_dtype
from growkit.checkpoint.reading import Checkpoint
from growkit.errors import InputError, reason
from growkit.families import families
from growkit.layouts import as_diff_transformer, read_layout
from growkit.modeling import register
from growkit.plan import Planned
from growkit.proof.inert import check_config_runs_nothing, without_kernels

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
    checkpoint = Checkpoint(folder)
    weights = readable(checkpoint)
    try:
        with quiet():
            loaded = _from_pretrained(
                folder,
                None if weights is checkpoint else weights,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, with the tensor's name
                output_loading_info=True,
            )
    except Exception as error:  # a config that does not fit may raise anything
        raise InputError(
            f"transformers cannot load {folder}: {type(error).__name__}, {reason(error)}; "
            "correct its config.json or its weights"
        ) from error
    model, loading = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        keys = loading[problem]
        if keys:
            name = min(str(key[0] if isinstance(key, tuple) else key) for key in keys)
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
        dtype = main_dtype(checkpoint.tensors)
        # As stored, whatever arithmetic is to be done with it.
        with torch._C.DisableTorchFunction():
            model = load(self._folder, getattr(torch, TORCH_NAMES[dtype]), CPU, None)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self.tensors = {
            name: TensorInfo(tuple(parameter.shape), dtype)
            for name, parameter in self._parameters.items()
        }

    def where(self, name: str | None = None) -> str:
        """The folder."""
        return str(self._folder)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor, whole."""
        yield self.read(name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some rows of it."""
        whole = self._parameters[name].detach()
        return whole if rows is None else whole[rows]

    def by_rows(self, name: str) -> bool:
        """All of it is in memory already."""
        return True


def empty_model(
    weights: Weights, dtype: torch.dtype, attention: str | None
) -> tuple[Any, Weights, Callable[[str], str]]:
    """The model of a checkpoint without its weights (buffers have theirs).

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
    with quiet(), _without_parameters():
        try:
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
                # Fast kernels of experts have no float64.
                experts_implementation="eager" if dtype == torch.float64 else None,
                trust_remote_code=False,
            )
        except InputError:
            raise
        except Exception as error:  # a config that does not fit may raise anything
            raise InputError(
                f"transformers cannot build the model of {weights.where()}: "
                f"{type(error).__name__}, {reason(error)}; correct its config.json"
            ) from error
    model.eval()
    tied = getattr(model, "all_tied_weights_keys", None) or {}

    def stored(name: str) -> str:
        return name if name in weights.tensors or name not in tied else str(tied[name])

    wanted = {stored(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    if isinstance(weights, Checkpoint) and wanted - weights.tensors.keys():
        known = wanted.union(tied, (name for name, _ in model.named_buffers()))
        if weights.tensors.keys() - known:  # nothing is missing, perhaps, but has another name
            weights = Loaded(weights)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = weights.tensors.get(stored(name))
        if found is None or found.shape != tuple(parameter.shape):
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
    try:
        with quiet(), torch.device("meta"):
            AutoModelForCausalLM.from_config(parsed(config, name), trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # a config that does not fit may raise anything
        raise InputError(
            f"transformers does not accept {name} ({type(error).__name__}: {reason(error)}); "
            "correct that value"
        ) from error


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
        collapse = rules[name].collapse
        assert collapse is not None
        arranged = collapse(gradient)
        assert arranged is not None
        return rules[name].sources[0], arranged

    return stored


def lacks_class(config: Config) -> bool:
    """Whether transformers has no class for a model, but growkit has."""
    from transformers import CONFIG_MAPPING

    register()
    known = {kind for family in families().values() if family.form for kind in family.model_types}
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
    with tempfile.TemporaryDirectory(prefix="growkit-config-") as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        return AutoConfig.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """Name and module of the embedding, of every decoder layer, and of the output head."""
    named = dict(model.named_modules())
    count = model.config.num_hidden_layers
    layers = next(
        name
        for name, module in named.items()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    name_of = {id(module): name for name, module in named.items()}
    return [
        (name_of[id(embedding)], embedding),
        *((f"{layers}.{index}", named[f"{layers}.{index}"]) for index in range(count)),
        (name_of[id(head)], head),
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, warnings and network.

    What matters is reported as an error, and every error as an ``Exception``: torch's
    ``CheckpointException`` is none, nor is a panic in Rust.
    """
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with patch.object(constants, "HF_HUB_OFFLINE", True):
            yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
