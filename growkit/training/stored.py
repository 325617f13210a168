"""Weights that files hold more widely than the model was loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import STORED_NAMES
from growkit.engine.class_weights import ClassWeights
from growkit.engine.loader import loading
from growkit.engine.oracle import readable


def keep_stored(model: nn.Module, folder: str | Path) -> list[str]:
    """Give parameters back that were narrowed as the model was loaded, in the dtype of the files.

    Where a layout has a norm for every head, its weights are products that only float64 holds
    (``docs/numerics.md``); ``from_pretrained(dtype=...)`` rounds them. Do it before the model is
    sharded: FSDP2 wants one dtype for all parameters of a layer, so it is for runs without it.

    Args:
        model: as transformers loaded it.
        folder: the folder that it was loaded from.

    Returns:
        The names of these parameters.

    Raises:
        InputError: the folder holds another model.
    """
    checkpoint = Checkpoint(folder)
    weights = readable(checkpoint)
    if weights is checkpoint:
        weights = ClassWeights(checkpoint, loading(checkpoint).conversions)
    changed = []
    for name, parameter in model.named_parameters():
        info = weights.tensors.get(name)
        if info is None:
            continue  # tied to another
        if info.shape != tuple(parameter.shape):
            raise InputError(
                f"{name} of the {type(model).__name__} has shape {list(parameter.shape)}, but "
                f"{list(info.shape)} in {folder}; give the folder that it was loaded from"
            )
        dtype = getattr(torch, STORED_NAMES[info.dtype])
        if torch.promote_types(dtype, parameter.dtype) != parameter.dtype:
            parameter.data = weights.read(name).to(parameter.device)
            changed.append(name)
    if not any(name in weights.tensors for name, _ in model.named_parameters()):
        raise InputError(
            f"no parameter of the {type(model).__name__} is one of the model in {folder}; give the "
            "folder that it was loaded from"
        )
    return changed
