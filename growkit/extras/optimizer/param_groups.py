"""The parameters of a model's class, and the groups in which they are trained.

The law of updates (``growkit.planning.updates``) is derived for tensors in files. Here it becomes
factors for the settings of each parameter of the class, for training (``docs/how-to/training.md``)
and for optimizer states.

All rows of a parameter share one eps. If the law gives rows different values (signal and noise
heads in one ``q_proj``), the shared value is between them and minimises the largest deviation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from growkit.algebra.update_law import Update
from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.base.tensors import TensorInfo
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.class_weights import converted, empty_model, tied_names
from growkit.engine.loader import Conversion, by_parameter, loading
from growkit.engine.transformers_class import require_class
from growkit.model.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, Folder
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.weight_file import open_weights
from growkit.planning.own_class import substitute
from growkit.planning.updates import recorded_law, stepped

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Options of a group that are learning rates, including those that schedulers add."""

OPTIMIZERS = ("adamw", "muon")

UNTRAINABLE = "it cannot train it; leave out --optimizer"
"""End of the sentence on a model without a class in transformers."""

ENGINES = r"module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
"""Parts of names that DDP, torch.compile, FSDP and activation checkpointing insert."""

WRAPPERS = re.compile(rf"\b({ENGINES}|base_layer|modules_to_save\.\w+)\.")
"""Parts of names that these and PEFT insert for a model's own parameters."""

ADAPTER_PARTS = re.compile(
    r"(?<=\.)(lora_(?:embedding_)?[AB]|lora_magnitude_vector|ia3_l"
    r"|trainable_tokens_delta)\.\w+"
)
"""PEFT's name of an adapter's parameter, followed by the adapter's name."""


MUON_ADJUSTMENTS: dict[str, Callable[[float, float], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factors of a matrix's rate in ``torch.optim.Muon``, by ``adjust_lr_fn``."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model's class.

    Attributes:
        where: the model's folder.
        shapes: shape of every parameter, by name, in the order of the class; tied parameters occur
            once.
        decayed: parameters with weight decay in ``Trainer``, which come first in its groups.
        hidden_matrices: those that Muon trains: all except the embedding and the head.
        conversions: transformers' conversions from tensors in files to parameters.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    decayed: frozenset[str]
    hidden_matrices: frozenset[str]
    conversions: tuple[Conversion, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Parameters:
        """List the parameters of a checkpoint's class.

        Raises:
            InputError: transformers has no class for the model, or the files do not fit it.
        """
        require_class(checkpoint.config, str(checkpoint.folder), UNTRAINABLE)
        model, *_ = empty_model(checkpoint, torch.float32)
        ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        first: dict[str, str] = {}  # of tied parameters, even if the files hold all of them
        for name, _ in model.named_parameters():
            first.setdefault(ties.get(name, name), name)
        every = dict(model.named_parameters())
        shapes = {name: tuple(every[name].shape) for name in first.values()}
        return cls(
            str(checkpoint.folder),
            shapes,
            decayed(model) & shapes.keys(),
            frozenset(hidden_matrices(model) & shapes.keys()),
            loading(checkpoint).conversions,
        )


def without_ends(model: nn.Module) -> set[str]:
    """Names of all parameters except those of the embedding and the output head."""
    ends: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        ends |= {id(parameter) for parameter in module.parameters()} if module else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) not in ends}


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters with weight decay in ``Trainer``: all except norms and biases.

    Args:
        model: the model, perhaps wrapped; the names are those of its ``named_parameters``.
    """
    from transformers import Trainer

    # The method does not use its trainer.
    paths = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    # Wrappers of a whole model (FSDP, checkpointing) do not occur in its parameters' names, but do
    # in these paths. Paths of norms without weights lead to None.
    chosen = {id(reduce(getattr, path.split("."), model)) for path in paths}
    return frozenset(
        name for name, parameter in model.named_parameters() if id(parameter) in chosen
    )


# The law of updates


@dataclass(frozen=True)
class Factors:
    """Factors of a parameter's settings.

    Attributes:
        lr: factor of the learning rate.
        weight_decay: factor of decoupled weight decay.
        eps: factor of AdamW's eps.
    """

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    @classmethod
    def of(
        cls, update: Update, shape: tuple[int, ...], muon: str | None, *, coupled: bool = False
    ) -> Factors:
        """Derive the factors of a parameter.

        Args:
            update: the law of updates of the parameter.
            shape: shape of the parameter.
            muon: ``adjust_lr_fn`` of Muon; None for AdamW.
            coupled: whether weight decay is part of the gradient, as in Adam.
        """
        if muon is None:
            decay = update.eps / update.rate if coupled else update.decay
            return cls(update.rate, decay, update.eps)
        if len(shape) != 2:
            return cls()  # Muon trains only matrices
        n_out = 1 / (update.eps * update.factor)
        rate = muon_rate(update.factor, update.n_in, n_out, (shape[0], shape[1]), muon)
        return cls(rate, 1 / rate)

    def scaled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Scale the options of a group."""
        by = dict.fromkeys(RATES, self.lr) | {"weight_decay": self.weight_decay, "eps": self.eps}
        return {
            key: value * by[key] if key in by and isinstance(value, int | float) else value
            for key, value in options.items()
        }


@dataclass(frozen=True)
class ParamGroup:
    """A group of parameters.

    Attributes:
        parameters: names of the parameters in the class, in order.
        options: all other entries, e.g. ``lr`` and ``betas``.
        rate: factor by which its learning rates were scaled.
        origin: index of the group from which it was split.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    rate: float = 1.0
    origin: int = 0

    def split(self, factors: Mapping[str, Factors], origin: int = 0) -> list[ParamGroup]:
        """Split the group by factors, and scale the options of each part.

        Groups are in the order in which their factors first occur; parameters keep their order. A
        group without parameters is left out, as torch.distributed.checkpoint cannot load one.

        Args:
            factors: factors of parameters, by name; other parameters stay unchanged.
            origin: index of this group.
        """
        alike: dict[Factors, list[str]] = {}
        for name in self.parameters:
            alike.setdefault(factors.get(name, Factors()), []).append(name)
        return [
            ParamGroup(tuple(names), scaling.scaled(self.options), scaling.lr, origin)
            for scaling, names in alike.items()
        ]


def class_updates(
    checkpoint: Checkpoint, updates: Mapping[str, Update], *, by_element: bool = True
) -> dict[str, Update]:
    """Turn the law of updates for tensors in files into that for parameters of the class.

    Args:
        checkpoint: the model.
        updates: the law for all tensors in its files.
        by_element: whether a parameter that combines tensors with different updates gets one for
            each element; otherwise it gets the one nearest to all.
    """
    if own := substitute(checkpoint.config):
        return stepped(own.plan(checkpoint), updates)
    return {
        name: _combine(checkpoint, name, conversion, updates, by_element)
        for name, conversion in by_parameter(loading(checkpoint).conversions).items()
    }


def _combine(
    checkpoint: Checkpoint,
    name: str,
    conversion: Conversion,
    updates: Mapping[str, Update],
    by_element: bool,
) -> Update:
    """Combine the updates of the tensors that transformers makes into a parameter."""
    of = [updates[source] for source in conversion.sources]
    distinct = {
        update if update.n_out.size > 1 else (update.rate, update.eps, update.new, update.why)
        for update in of
    }
    if conversion.transform is None or len(distinct) == 1:
        return of[0]
    rates = [update.rate for update in of]
    if by_element:
        factors = {
            pattern: [
                torch.from_numpy(
                    np.broadcast_to(updates[part].gradient, checkpoint.tensors[part].shape).copy()
                )
                for part in names
            ]
            for pattern, names in conversion.tensors.items()
        }
        with stored_dtypes():
            n_out = 1 / converted(conversion, factors)[name].numpy()
    else:
        shared = [update.n_out * update.factor for update in of]
        least, greatest = min(scale.min() for scale in shared), max(scale.max() for scale in shared)
        n_out = np.asarray((least + greatest) / 2)
    combined = replace(of[0], n_in=len(rates) / sum(rates), n_out=n_out, factor=1.0)
    return combined if len(set(rates)) == 1 else combined.because("its parts have different rates")


# Groups for training


def param_groups(
    model: nn.Module,
    folder: str | Path | None,
    *,
    lr: float,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    optimizer: str = "adamw",
    adjust_lr_fn: str = "original",
    decays: Callable[[str, nn.Parameter], bool] | None = None,
    only: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Make parameter groups for ``torch.optim.AdamW`` or ``torch.optim.Muon``.

    Settings are those for training the source; each group has them scaled for the grown model.
    Groups with weight decay come first, as in transformers' Trainer. Parameters that are not in the
    folder (a new adapter, a head for another task) get the settings unscaled.

    Rows of a router that choose the pieces of one MLP (``--granularity``) get hooks that share
    their gradient, so that they stay equal. FSDP2 calls no such hooks.

    Args:
        model: the grown model, perhaps wrapped (FSDP2, DDP, torch.compile, peft).
        folder: folder of the grown model, or of its grown adapter if only that is trained; weights
            are not read. None for a model that was not grown: all its settings stay unscaled.
        lr: the learning rate.
        weight_decay: weight decay of the parameters that have any.
        eps: AdamW's eps; Muon, which normalises gradients, keeps its own.
        optimizer: ``adamw`` or ``muon``.
        adjust_lr_fn: Muon's ``adjust_lr_fn``.
        decays: whether a parameter has weight decay; None for the choice of transformers' Trainer.
        only: whether a parameter is included; None for all, or with Muon all ``hidden_matrices``.

    Raises:
        InputError: growkit did not write the folder, or the model is another one; or an option has
            an unknown value.
    """
    for value, known in ((optimizer, OPTIMIZERS), (adjust_lr_fn, tuple(MUON_ADJUSTMENTS))):
        if value not in known:
            raise InputError(
                f"{value!r} is not known; choose {' or '.join(known)}{perhaps(value, known)}"
            )
    muon = adjust_lr_fn if optimizer == "muon" else None
    updates = {} if folder is None else matched(model, folder)
    matrices = hidden_matrices(model) if muon and only is None else set()
    usual = decayed(model) if decays is None else frozenset()
    parameters = dict(model.named_parameters())
    factors: dict[str, Factors] = {}
    decaying, others = list[str](), list[str]()
    for name, parameter in parameters.items():
        wanted = only(name, parameter) if only else not muon or name in matrices
        if not parameter.requires_grad or not wanted:
            continue
        if muon and parameter.dim() != 2:
            raise InputError(f"{name} is not a matrix, but Muon trains only these; leave it out")
        update = updates.get(name, Update())
        factors[name] = Factors.of(update, tuple(parameter.shape), muon)
        if update.together > 1 and not isinstance(parameter, DTensor):
            parameter.register_hook(partial(_shared_among_rows, update.together))
        has_decay = decays(name, parameter) if decays else name in usual
        (decaying if has_decay else others).append(name)
    options = {"lr": lr, **({"adjust_lr_fn": muon} if muon else {"eps": eps})}
    groups = [
        ParamGroup(tuple(names), {**options, "weight_decay": decay})
        for names, decay in ((decaying, weight_decay), (others, 0.0))
    ]
    return [
        {"params": [parameters[name] for name in part.parameters], **part.options}
        for group in groups
        for part in group.split(factors)
    ]


def _shared_among_rows(count: int, gradient: Tensor) -> Tensor:
    """Give every row the mean gradient of its group of consecutive rows, which so stay equal."""
    groups = gradient.unflatten(0, (-1, count))
    mean: Tensor = groups.mean(1, keepdim=True)
    return mean.expand_as(groups).reshape(gradient.shape)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices that Muon should train: all except the embedding and the head."""
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    return matrices & without_ends(model)


def matched(model: nn.Module, folder: str | Path) -> dict[str, Update]:
    """Find the update of every parameter of a model; parameters not in the folder are unscaled.

    Raises:
        InputError: the model, or its adapter, is not the one in the folder.
    """
    opened = Folder(folder)
    if opened.has(ADAPTER):
        name = next((file for file in ADAPTER_WEIGHTS if opened.find(file)), ADAPTER_WEIGHTS[0])
        headers: Mapping[str, TensorInfo] = open_weights(opened, name).tensors
        checkpoint = None
    else:
        checkpoint = Checkpoint(folder)
        headers = checkpoint.tensors
    known = recorded_law(opened, headers).updates
    shapes = {name: info.shape for name, info in headers.items()}
    if checkpoint and not substitute(checkpoint.config):
        known = class_updates(checkpoint, known, by_element=False)
        conversions = by_parameter(loading(checkpoint).conversions)
        shapes = {name: conversion.shapes[name] for name, conversion in conversions.items()}
    modules = (getattr(module, "all_tied_weights_keys", None) for module in model.modules())
    # Of the model itself, or of the first module that is not a wrapper.
    ties: dict[str, str] = next((tied for tied in modules if isinstance(tied, dict)), {})
    updates, expected = {}, {}
    for name, _ in model.named_parameters():
        alike = tied_names(class_name(name), ties) if checkpoint else [_adapter_key(name)]
        key = next((alias for alias in alike if alias in known), None)
        updates[name] = known[key] if key else Update()
        if key:
            expected[name] = shapes[key]
    check_same(model, expected, folder)
    return updates


def _adapter_key(name: str) -> str:
    """The name of an adapter's parameter in its file."""
    plain = re.sub(rf"\b({ENGINES}|modules_to_save\.\w+)\.", "", name)
    plain = ADAPTER_PARTS.sub(r"\1", plain).replace("magnitude_vector.weight", "magnitude_vector")
    return f"base_model.model.{plain.removeprefix('base_model.model.')}"


def check_same(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], folder: str | Path) -> None:
    """Refuse a model that is not the one in a folder.

    Args:
        model: the model in memory.
        shapes: shapes in the folder, by the names of the model's parameters.
        folder: the folder.

    Raises:
        InputError: the folder has no parameter of the model, or one of another shape.
    """
    kind, remedy = type(model).__name__, "give the folder that it was loaded from"
    for name, parameter in model.named_parameters():
        if name in shapes and shapes[name] != tuple(parameter.shape):
            raise InputError(
                f"{name} of the {kind} has shape {list(parameter.shape)}, but "
                f"{list(shapes[name])} in {folder}; {remedy}"
            )
    if not shapes:
        raise InputError(f"{folder} has no parameter of the {kind}; {remedy}")


def class_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers insert."""
    return WRAPPERS.sub("", name.removeprefix("base_model.model."))


def muon_rate(
    times: float, n_in: float, n_out: float, shape: tuple[int, int], adjust_lr_fn: str
) -> float:
    """The factor of Muon's rate for a tiled matrix (``torch/optim/_muon.py``).

    Orthogonalising a matrix that is tiled a × b times gives the tiled orthogonal matrix times
    1/√(a·b). torch multiplies it by an adjustment for the larger shape.

    Args:
        times: factor of the weights, apart from the split.
        n_in: number of parts into which the weights are split.
        n_out: number of copies that share a gradient.
        shape: [rows, columns] of the grown matrix.
        adjust_lr_fn: Muon's ``adjust_lr_fn``.
    """
    rows, columns = shape
    adjusted = MUON_ADJUSTMENTS[adjust_lr_fn]
    before = adjusted(rows / n_out, columns / n_in)
    return times * math.sqrt(n_out / n_in) * before / adjusted(rows, columns)
