"""A model without its weights: its class, built from the config, and where its layers are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Weights
from growkit.engine.class_weights import ClassWeights
from growkit.engine.loader import loading
from growkit.engine.oracle import experts_implementation, fit_experts, parsed, quiet, readable
from growkit.engine.uninitialised import uninitialised

OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Config keys that ask for more than logits, and change nothing of these."""


def empty_model(
    weights: Weights, dtype: torch.dtype, attention: str | None
) -> tuple[Any, Weights, Callable[[str], str]]:
    """The model of a checkpoint without its weights; buffers are what the class makes of them.

    Args:
        weights: a checkpoint, on disk or planned.
        dtype: of the parameters, but for those that the class keeps in another.
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
        uninitialised("meta"),
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
            _with_logits_alone(config),
            dtype=dtype,
            attn_implementation=attention,
            experts_implementation=experts_implementation(dtype),
            trust_remote_code=False,
        )
    fit_experts(model)
    model.eval()
    _keep_wide(model, dtype)
    if isinstance(weights, Checkpoint):
        weights = ClassWeights(weights, loading(weights).conversions)
    stored = _ties(getattr(model, "all_tied_weights_keys", None) or {}, weights)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
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


def _with_logits_alone(config: Any) -> Any:
    """The config of the same function, which returns nothing next to the logits.

    A class collects the logits of its routers, say, from layers that do not run in this call.
    """
    for key in OUTPUTS:
        if getattr(config, key, False):
            setattr(config, key, False)
    return config


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model stores beside its parameters, by name."""
    stored, buffers = model.state_dict(keep_vars=True), dict(model.named_buffers())
    return {name: tensor for name, tensor in stored.items() if name in buffers}


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


def _keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Let parameters and buffers be float32 that the class keeps so, whatever it is loaded in."""
    wide: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = [(re.compile(name.replace("*", ".*")), wide[name]) for name in wide]
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        kept = next((dtype for pattern, dtype in patterns if pattern.search(name)), None)
        if kept is not None:
            tensor.data = tensor.data.to(kept)


def _ties(tied: Mapping[str, str], weights: Weights) -> Callable[[str], str]:
    """From the name of a parameter to that of the tensor it is stored as.

    Of tied parameters any may be the one that is there.
    """

    def stored(name: str) -> str:
        if name in weights.tensors:
            return name
        source = tied.get(name, name)
        others = (source, *(other for other, of in tied.items() if of == source))
        return next((other for other in others if other in weights.tensors), source)

    return stored
