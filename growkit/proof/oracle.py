"""The oracle: the real transformers class, loaded from the written files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint import Config
from growkit.errors import InputError, reason


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
    from transformers import AutoModelForCausalLM

    with quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
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


def check_config(config: Config, name: str) -> None:
    """Build the model of a config without weights, to see whether transformers takes it.

    Args:
        config: contents of a ``config.json``.
        name: what to call it in the message.

    Raises:
        InputError: transformers does not take it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        try:
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), trust_remote_code=False
            )
        except Exception as error:  # a config that does not fit may raise anything
            raise InputError(
                f"transformers does not accept {name} ({type(error).__name__}: {reason(error)}); "
                "correct that value"
            ) from error


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token logits of one sequence.

    Args:
        model: from ``load``.
        ids: token ids, [tokens].

    Returns:
        [tokens, vocabulary], in the model's dtype, on its device.
    """
    with torch.no_grad():
        output: Tensor = model(
            ids[None].to(next(model.parameters()).device), use_cache=False
        ).logits
    return output[0]


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


def hidden_states(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What the embedding and every decoder layer hand on, each [tokens, hidden]."""
    states: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach()[0])

    hooks = [module.register_forward_hook(keep) for _, module in blocks(model)[:-1]]
    try:
        logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return states


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings: what matters is reported as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
