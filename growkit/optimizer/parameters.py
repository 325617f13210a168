"""The parameters of a model as its optimizer knows them: the class's own, in the class's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import nn

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import empty_model
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model's class.

    Attributes:
        where: the model's folder.
        shapes: of every parameter, by name, in the order of the class; tied ones come once.
        decayed: those that ``Trainer`` lets decay, which come first in its groups.
        vocabulary: those with a row for every token.
        conversions: how transformers makes them of the tensors in files.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    decayed: frozenset[str]
    vocabulary: frozenset[str]
    conversions: tuple[Conversion, ...]


def check_trainable(config: Config, where: str) -> None:
    """Refuse a model that transformers cannot train.

    Raises:
        InputError: it has no class for it.
    """
    if lacks_class(config):
        raise InputError(
            f"transformers has no class for the {config['model_type']} model in {where}, so it "
            "does not train there; leave out --optimizer"
        )


def parameters_of(checkpoint: Checkpoint) -> Parameters:
    """Ask transformers.

    Raises:
        InputError: it has no class for the model, or the files do not fit it.
    """
    check_trainable(checkpoint.config, str(checkpoint.folder))
    model, _, stored = empty_model(checkpoint, torch.float32, "eager")
    first: dict[str, str] = {}  # of tied parameters
    for name, _ in model.named_parameters():
        first.setdefault(stored(name), name)
    every = dict(model.named_parameters())
    shapes = {name: tuple(every[name].shape) for name in first.values()}
    return Parameters(
        str(checkpoint.folder),
        shapes,
        decayed(model) & shapes.keys(),
        frozenset(every.keys() - without_ends(model)),
        loading(checkpoint).conversions,
    )


def without_ends(model: nn.Module) -> set[str]:
    """Names of all parameters but those of the embedding and the output head."""
    ends: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        ends |= {id(parameter) for parameter in module.parameters()} if module else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) not in ends}


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that transformers' ``Trainer`` lets decay: all but norms and biases.

    Args:
        model: as it is or wrapped; the names are those of its ``named_parameters``.
    """
    from transformers import Trainer

    # A method that uses nothing of its trainer.
    paths = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    # Wrappers around all of a model (FSDP, checkpointing) leave themselves out of the names that
    # they give, but not of these paths. Of norms without weights there are paths to None.
    chosen = {id(reduce(getattr, path.split("."), model)) for path in paths}
    return frozenset(name for name, each in model.named_parameters() if id(each) in chosen)
